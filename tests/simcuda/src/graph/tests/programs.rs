//! Random captures against an oracle of sets: a launch keeps exactly the orders of the captured
//! calls, whichever streams it was captured from and is launched in.

use cudarc::driver::sys::{CUevent, CUstream};
use proptest::prelude::*;

use super::{captured, instantiate};
use crate::config::{Config, Schedule};
use crate::event::calls::*;
use crate::graph::calls::*;
use crate::stream::tests::{Bench, SUCCESS, bench, config};

/// The first one begins the capture.
const STREAMS: usize = 3;

#[derive(Clone, Copy, Debug)]
enum Step {
    Run(usize),
    Order(usize, usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => (0..STREAMS).prop_map(Step::Run),
        1 => (0..STREAMS, 0..STREAMS).prop_map(|(first, second)| Step::Order(first, second)),
    ];
    prop::collection::vec(step, 1..24)
}

/// Runs the steps in the capture that streams[0] began; returns each piece's past as a bit set.
fn give(bench: &Bench, streams: &[CUstream], steps: &[Step]) -> Vec<u64> {
    let mut pasts: Vec<u64> = Vec::new();
    // Nothing: not part of the capture.
    let mut known: [Option<u64>; STREAMS] = [Some(0), None, None];
    for step in steps {
        match *step {
            Step::Run(stream) => {
                let Some(past) = known[stream] else { continue };
                bench.write(streams[stream], &pasts.len().to_string());
                known[stream] = Some(past | 1 << pasts.len());
                pasts.push(past);
            }
            Step::Order(first, second) => {
                let Some(past) = known[first] else { continue };
                bench.order(streams[first], streams[second]);
                known[second] = Some(known[second].unwrap_or(0) | past);
            }
        }
    }
    (1..STREAMS)
        .filter(|stream| known[*stream].is_some())
        .for_each(|stream| bench.order(streams[stream], streams[0]));
    pasts
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn a_launch_keeps_the_orders_of_its_capture_and_no_more(
        steps in steps(),
        seed in any::<u64>(),
        schedule in prop::sample::select(vec![Schedule::Random, Schedule::Lazy, Schedule::Eager]),
    ) {
        let bench = bench(Config { schedule, ..config(seed) });
        let streams: Vec<CUstream> = (0..STREAMS).map(|_| bench.stream()).collect();
        let mut pasts = Vec::new();
        let graph = captured(streams[0], || pasts = give(&bench, &streams, &steps));
        let executable = instantiate(graph);
        // On different streams without an event: still one after the other.
        for stream in &streams {
            prop_assert_eq!(cuGraphLaunch(executable, *stream), SUCCESS);
        }
        let end: CUevent = bench.event();
        prop_assert_eq!(cuEventRecord(end, streams[STREAMS - 1]), SUCCESS);
        prop_assert_eq!(cuEventSynchronize(end), SUCCESS);
        let ran = bench.ran();
        prop_assert_eq!(ran.len(), pasts.len() * STREAMS, "the last launch is behind all others");
        for launch in ran.chunks(pasts.len().max(1)) {
            let mut done = 0_u64;
            for name in launch {
                let piece: usize = name.parse().expect("pieces are called by their number");
                prop_assert_eq!(pasts[piece] & !done, 0, "{} runs too early in {:?}", piece, launch);
                done |= 1 << piece;
            }
            prop_assert_eq!(done, (1 << pasts.len()) - 1, "each launch runs each node once");
        }
        let is_total_order = pasts.iter().enumerate().all(|(piece, past)| *past == (1 << piece) - 1);
        prop_assert_eq!(bench.findings().is_empty(), is_total_order, "{:?}", ran);
    }
}
