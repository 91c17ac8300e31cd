//! The three schedules, seen from the entry points.

mod programs;

use cudarc::driver::sys::CUstream;

use crate::config::{Config, Schedule};
use crate::graph::calls::*;
use crate::graph::capture_calls::*;
use crate::stream::calls::*;
use crate::stream::tests::{Bench, SUCCESS, bench, config, got};

/// Three streams with three pieces each, and one order between two of them.
fn fill(bench: &Bench) -> [CUstream; 3] {
    let streams = [bench.stream(), bench.stream(), bench.stream()];
    for round in 0..3 {
        for (index, stream) in streams.into_iter().enumerate() {
            bench.run(stream, &format!("{index}{round}"));
        }
        if round == 0 {
            bench.order(streams[0], streams[1]);
        }
    }
    streams
}

fn order_with(schedule: Schedule, seed: u64) -> Vec<String> {
    let bench = bench(Config {
        schedule,
        ..config(seed)
    });
    let streams = fill(&bench);
    assert_eq!(cuStreamSynchronize(streams[1]), SUCCESS);
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    bench.ran()
}

#[test]
fn the_same_seed_and_the_same_calls_give_the_same_order() {
    for seed in 0..10 {
        assert_eq!(
            order_with(Schedule::Random, seed),
            order_with(Schedule::Random, seed)
        );
    }
    let orders: std::collections::BTreeSet<Vec<String>> = (0..20)
        .map(|seed| order_with(Schedule::Random, seed))
        .collect();
    assert!(
        orders.len() > 10,
        "twenty seeds give only {} orders",
        orders.len()
    );
}

#[test]
fn every_order_is_one_that_cuda_allows() {
    for seed in 0..100 {
        let order = order_with(Schedule::Random, seed);
        let place = |name: &str| {
            order
                .iter()
                .position(|ran| ran == name)
                .expect("all of it ran")
        };
        for stream in 0..3 {
            assert!(place(&format!("{stream}0")) < place(&format!("{stream}1")));
            assert!(place(&format!("{stream}1")) < place(&format!("{stream}2")));
        }
        // The second stream waits for the first piece of the first, from its second piece on.
        assert!(place("00") < place("11"), "seed {seed}: {order:?}");
    }
}

#[test]
fn lazy_runs_only_what_is_waited_for() {
    let bench = bench(Config {
        schedule: Schedule::Lazy,
        ..config(0)
    });
    let streams = fill(&bench);
    assert_eq!(cuStreamSynchronize(streams[1]), SUCCESS);
    // 00 is before the wait of the second stream; nothing else of the others is needed.
    assert_eq!(bench.ran(), ["10", "00", "11", "12"]);
    assert_eq!(cuStreamSynchronize(streams[2]), SUCCESS);
    assert_eq!(bench.ran()[4..], ["20", "21", "22"]);
}

#[test]
fn eager_runs_everything_at_each_wait_in_the_order_of_the_calls() {
    let bench = bench(Config {
        schedule: Schedule::Eager,
        ..config(0)
    });
    let streams = fill(&bench);
    assert_eq!(cuStreamSynchronize(streams[1]), SUCCESS);
    assert_eq!(
        bench.ran(),
        ["00", "10", "20", "01", "11", "21", "02", "12", "22"]
    );
}

#[test]
fn schedules_vary_how_far_other_streams_have_run() {
    let extra: Vec<usize> = (0..40)
        .map(|seed| {
            let bench = bench(config(seed));
            let (waited, other) = (bench.stream(), bench.stream());
            (0..4).for_each(|_| bench.run(waited, "waited"));
            (0..4).for_each(|_| bench.run(other, "other"));
            assert_eq!(cuStreamSynchronize(waited), SUCCESS);
            bench.ran().iter().filter(|name| *name == "other").count()
        })
        .collect();
    assert!(extra.contains(&0) && extra.contains(&4), "{extra:?}");
}

#[test]
fn lazy_finds_what_a_launch_needs_also_behind_the_null_stream() {
    let bench = bench(Config {
        schedule: Schedule::Lazy,
        ..config(0)
    });
    let (stream, blocking) = (bench.stream(), bench.blocking_stream());
    assert_eq!(cuStreamBeginCapture_v2(stream, 1), SUCCESS);
    bench.run(stream, "node");
    let graph = got(|graph| cuStreamEndCapture(stream, graph));
    let executable = got(|executable| cuGraphInstantiateWithFlags(executable, graph, 0));
    bench.run(blocking, "before");
    bench.run(std::ptr::null_mut(), "null");
    assert_eq!(cuGraphLaunch(executable, blocking), SUCCESS);
    // After the launch on the blocking stream, because it is the same executable.
    assert_eq!(cuGraphLaunch(executable, stream), SUCCESS);
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(bench.ran(), ["before", "null", "node", "node"]);
}
