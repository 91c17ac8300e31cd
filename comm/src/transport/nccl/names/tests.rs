use std::panic::Location;
use std::time::Duration;

use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

use super::*;
use crate::collective::{Reduce, Sum};

const SUM: Operation = Operation::AllReduce(Reduce::Sum);

fn with<R>(operations: &[(Operation, &str, usize)], look: impl FnOnce(&[Call<'_>]) -> R) -> R {
    let stream = Stream::default_of(Device::Cpu).unwrap();
    let tensor = |(_, name, count): &(Operation, &str, usize)| {
        Tensor::zeros(&[*count], DType::F32, Device::Cpu)
            .unwrap()
            .named(name)
    };
    let tensors: Vec<Tensor> = operations.iter().map(tensor).collect();
    let call = |((operation, ..), tensor): (&(Operation, _, _), _)| Call {
        operation: *operation,
        tensor: Some(tensor),
        stream: &stream,
        sequence: 0,
        timeout: Duration::from_secs(1),
        is_followed: false,
        sum: Sum::Transport,
        group: "gradients",
        site: Location::caller(),
    };
    look(
        &operations
            .iter()
            .zip(&tensors)
            .map(call)
            .collect::<Vec<_>>(),
    )
}

#[test]
fn mismatched_calls_have_different_keys() {
    let all = [
        (SUM, "a", 10),
        (SUM, "b", 10),
        (SUM, "a", 11),
        (Operation::AllGather, "a", 10),
        (Operation::ReduceScatter(Reduce::Sum), "a", 10),
        (Operation::Broadcast { root: 0 }, "a", 10),
        (Operation::Broadcast { root: 1 }, "a", 10),
    ];
    let mut keys: Vec<u32> = all.iter().map(|one| with(&[*one], key)).collect();
    assert_eq!(keys, all.map(|one| with(&[one], key)));
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), all.len());
    let (one, other) = (
        (Operation::Broadcast { root: 0 }, "a", 10),
        (Operation::Broadcast { root: 0 }, "b", 10),
    );
    assert_eq!(
        with(&[one], key),
        with(&[other], key),
        "who gives and who takes may call it differently"
    );
    assert_ne!(with(&[all[0], all[1]], key), with(&[all[1], all[0]], key));
}

#[test]
fn pairs_have_a_lane_of_their_own_and_do_not_disturb_collectives() {
    let (send, receive) = (
        (Operation::Send { to: 1 }, "x", 5),
        (Operation::Receive { from: 1 }, "y", 5),
    );
    assert_eq!(
        (with(&[send, receive], lane), with(&[send, receive], peer)),
        (PAIRS, Some(1))
    );
    let from_another = (Operation::Receive { from: 2 }, "y", 5);
    assert_eq!(
        (
            with(&[send, from_another], lane),
            with(&[send, from_another], peer)
        ),
        (PAIRS, None)
    );
    let sum = (SUM, "a", 10);
    assert_eq!(
        (with(&[sum, send], lane), with(&[sum, send], peer)),
        (COLLECTIVES, None)
    );
    assert_eq!(with(&[sum, send], key), with(&[from_another, sum], key));
    assert_ne!(with(&[send], key), with(&[receive], key));
}

#[test]
fn shortened_call_texts_keep_their_source_line() {
    let text_of = |operations: &[(Operation, &str, usize)]| with(operations, text);
    let one = text_of(&[(SUM, "bucket 2", 10)]);
    assert!(
        one.starts_with("all_reduce sum of \"bucket 2\" f32[10] on cpu (group gradients, at "),
        "{one}"
    );
    assert!(one.contains("names/tests.rs:"), "{one}");
    let many = text_of(&[(Operation::Send { to: 1 }, "x", 5); 64]);
    assert!(
        many.starts_with("send to rank 1 of \"x\" f32[5] on cpu, together with send to rank 1 of"),
        "{many}"
    );
    assert!(
        many.contains('…') && many.contains("names/tests.rs:") && many.len() <= 240,
        "{many}"
    );
}
