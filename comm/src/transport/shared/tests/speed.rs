//! How fast it is, by hand: `cargo test --release -p ddp-comm speed -- --ignored --nocapture
//! --test-threads=1`.

use std::time::Instant;

use super::*;

/// The gradients of an MLP of 784-1024-1024-10: 7.4 MB.
const COUNT: usize = 784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10;

/// Times of a call on this rank, in µs: the fastest, the middle one, and one of a hundred slowest.
fn time(rounds: usize, mut body: impl FnMut()) -> String {
    (0..rounds / 10).for_each(|_| body());
    let mut times: Vec<f64> = (0..rounds)
        .map(|_| {
            let started = Instant::now();
            body();
            started.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((rounds - 1) as f64 * share) as usize];
    format!(
        "min {:8.2}  median {:8.2}  99 % {:8.2} µs",
        at(0.0),
        at(0.5),
        at(0.99)
    )
}

/// What each rank measures; rank 0 says it.
pub(super) fn in_this_process(group: &Group) {
    ddp_kernels::threads::pin_current(group.rank());
    let stream = stream();
    let say = |what: &str, times: String| {
        if group.rank() == 0 {
            println!("speed {what:<34} {times}");
        }
    };
    let zeros = |count: usize, dtype: DType| Tensor::zeros(&[count], dtype, Device::Cpu).unwrap();
    let (large, narrow) = (zeros(COUNT, DType::F32), zeros(COUNT, DType::BF16));
    let rounds = 500;
    say(
        "all_reduce sum 7.4 MB f32",
        time(rounds, || {
            group.all_reduce(&large, Reduce::Sum, &stream).unwrap()
        }),
    );
    say(
        "all_reduce sum 3.7 MB bf16",
        time(rounds, || {
            group.all_reduce(&narrow, Reduce::Sum, &stream).unwrap()
        }),
    );
    say(
        "all_reduce max 7.4 MB f32",
        time(rounds, || {
            group.all_reduce(&large, Reduce::Max, &stream).unwrap()
        }),
    );
    say(
        "reduce_scatter 7.4 MB f32",
        time(rounds, || {
            group.reduce_scatter(&large, Reduce::Sum, &stream).unwrap()
        }),
    );
    say(
        "all_gather 7.4 MB f32",
        time(rounds, || group.all_gather(&large, &stream).unwrap()),
    );
    say(
        "broadcast 7.4 MB f32",
        time(rounds, || group.broadcast(&large, 0, &stream).unwrap()),
    );
    for count in [
        4,
        256,
        512,
        1024,
        1025,
        2048,
        4096,
        16 << 10,
        64 << 10,
        256 << 10,
    ] {
        let tensor = zeros(count, DType::F32);
        let what = format!("all_reduce sum {} B f32", 4 * count);
        say(
            &what,
            time(5000, || {
                group.all_reduce(&tensor, Reduce::Sum, &stream).unwrap()
            }),
        );
    }
    say("barrier", time(20_000, || group.barrier(&stream).unwrap()));
    let other = 1 - group.rank().min(1);
    let tensor = zeros(4, DType::F32);
    if group.rank() < 2 {
        let times = time(5000, || {
            if group.rank() == 0 {
                group.send(&tensor, other, &stream).unwrap();
                group.receive(&tensor, other, &stream).unwrap();
            } else {
                group.receive(&tensor, other, &stream).unwrap();
                group.send(&tensor, other, &stream).unwrap();
            }
        });
        say("send and receive back 16 B", times);
    }
}

#[test]
#[ignore = "a measurement"]
fn between_two_processes() {
    println!("{}", lines(&processes::run(2, "speed")[0]));
}

#[test]
#[ignore = "a measurement"]
fn between_two_threads() {
    on_all(&ranks(2), |rank| in_this_process(&group(rank, 0, "main")));
}

fn lines(text: &str) -> String {
    text.lines()
        .filter(|line| line.contains("speed"))
        .map(|line| format!("{line}\n"))
        .collect()
}
