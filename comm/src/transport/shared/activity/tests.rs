use super::*;
use crate::collective::Sum;
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Tensor};
use std::panic::Location;
use std::time::Duration;

fn call<'a>(
    operation: Operation,
    tensor: Option<&'a Tensor>,
    stream: &'a Stream,
    sequence: u64,
) -> Call<'a> {
    let (timeout, group, site) = (Duration::from_secs(1), "gradients", Location::caller());
    Call {
        operation,
        tensor,
        stream,
        sequence,
        timeout,
        is_followed: false,
        sum: Sum::Transport,
        group,
        site,
    }
}

#[test]
fn every_call_reads_as_it_was_written() {
    let words: [AtomicU64; WORDS] = Default::default();
    let record = ActivityRecord::new(|index| &words[index]);
    assert_eq!(record.read(), None);
    let stream = Stream::default_of(Device::Cpu).unwrap();
    let tensor = Tensor::zeros(&[2, 3], DType::BF16, Device::Cpu).unwrap();
    for (sequence, (operation, has_tensor, expected)) in [
        (
            Operation::AllReduce(Reduce::Sum),
            true,
            "all_reduce sum of bf16 × 6",
        ),
        (
            Operation::ReduceScatter(Reduce::Min),
            true,
            "reduce_scatter min of bf16 × 6",
        ),
        (Operation::AllGather, true, "all_gather of bf16 × 6"),
        (
            Operation::Broadcast { root: 200 },
            true,
            "broadcast from rank 200 of bf16 × 6",
        ),
        (
            Operation::Send { to: 3 },
            true,
            "send to rank 3 of bf16 × 6",
        ),
        (
            Operation::Receive { from: 1 },
            true,
            "receive from rank 1 of bf16 × 6",
        ),
        (Operation::Barrier, false, "barrier"),
    ]
    .into_iter()
    .enumerate()
    {
        let call = call(
            operation,
            has_tensor.then_some(&tensor),
            &stream,
            sequence as u64,
        );
        record.enter(&call);
        let seen = record.read().unwrap();
        let place = format!("{}:{}", call.site.file(), call.site.line());
        assert_eq!(
            seen.to_string(),
            format!("{expected} (call {sequence} of group gradients, at {place})")
        );
        assert!(seen.in_progress);
        record.exit();
        assert!(!record.read().unwrap().in_progress);
    }
}

#[test]
fn a_record_that_is_read_is_always_whole() {
    let words: [AtomicU64; WORDS] = Default::default();
    let stream = Stream::default_of(Device::Cpu).unwrap();
    let tensors = [1, 2].map(|count| Tensor::zeros(&[count], DType::F32, Device::Cpu).unwrap());
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let record = ActivityRecord::new(|index| &words[index]);
            for sequence in 0..20_000 {
                let tensor = &tensors[sequence % 2];
                record.enter(&call(
                    Operation::AllGather,
                    Some(tensor),
                    &stream,
                    tensor.count() as u64,
                ));
            }
            done.store(true, Ordering::Release);
        });
        let record = ActivityRecord::new(|index| &words[index]);
        while !done.load(Ordering::Acquire) {
            if let Some(seen) = record.read() {
                assert!(
                    seen.what.ends_with(&format!("× {}", seen.sequence)),
                    "{seen}"
                );
            }
        }
    });
}

#[test]
fn invalid_words_become_text() {
    let seen = decode(&[u64::MAX; WORDS]);
    assert!(seen.to_string().starts_with("an unknown call"), "{seen}");
    assert_eq!(
        decode(&array::from_fn(|word| if word == OPERATION {
            1 | 99 << 8
        } else {
            0
        }))
        .what,
        "all_reduce sum"
    );
}
