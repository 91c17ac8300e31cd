//! Random programs against an oracle that computes each piece's past with sets. Every schedule must
//! keep these orders, no wait may return early, and a race must be found exactly if two writers of
//! the same bytes are unordered.

use cudarc::driver::sys::{CUevent, CUstream};
use proptest::prelude::*;

use crate::config::{Config, Schedule};
use crate::event::calls::*;
use crate::stream::calls::*;
use crate::stream::tests::{SUCCESS, bench, config};

/// The null stream, two blocking ones, two non-blocking ones.
const STREAMS: usize = 5;
const EVENTS: usize = 3;

#[derive(Clone, Copy, Debug)]
enum Step {
    Run(usize),
    Record(usize, usize),
    Wait(usize, usize),
    SynchronizeStream(usize),
    SynchronizeEvent(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..STREAMS).prop_map(Step::Run),
        3 => (0..STREAMS, 0..EVENTS).prop_map(|(stream, event)| Step::Record(stream, event)),
        4 => (0..STREAMS, 0..EVENTS).prop_map(|(stream, event)| Step::Wait(stream, event)),
        1 => (0..STREAMS).prop_map(Step::SynchronizeStream),
        1 => (0..EVENTS).prop_map(Step::SynchronizeEvent),
    ];
    prop::collection::vec(step, 1..24)
}

/// Sets of pieces as bits, numbered in the order of the calls.
#[derive(Default)]
struct Oracle {
    pieces: usize,
    pasts: Vec<u64>,
    streams: [u64; STREAMS],
    events: [Option<u64>; EVENTS],
    host: u64,
}

fn is_blocking(stream: usize) -> bool {
    (1..=2).contains(&stream)
}

impl Oracle {
    /// Queues to a stream: ordered after the host, and by the null stream's rules.
    fn enter(&mut self, stream: usize) {
        self.streams[stream] |= self.host;
        if stream == 0 {
            self.streams[0] |= self.streams[1] | self.streams[2];
        } else if is_blocking(stream) {
            self.streams[stream] |= self.streams[0];
        }
    }

    /// Does the step, and returns which pieces must have run after it.
    fn step(&mut self, step: Step) -> u64 {
        match step {
            Step::Run(stream) => {
                self.enter(stream);
                self.pasts.push(self.streams[stream]);
                self.streams[stream] |= 1 << self.pieces;
                self.pieces += 1;
            }
            Step::Record(stream, event) => {
                self.enter(stream);
                self.events[event] = Some(self.streams[stream]);
            }
            Step::Wait(stream, event) => {
                if let Some(past) = self.events[event] {
                    self.enter(stream);
                    self.streams[stream] |= past;
                }
            }
            Step::SynchronizeStream(stream) => {
                let blocking = if stream == 0 {
                    self.streams[1] | self.streams[2]
                } else {
                    0
                };
                self.host |= self.streams[stream] | blocking;
            }
            Step::SynchronizeEvent(event) => self.host |= self.events[event].unwrap_or(0),
        }
        self.host
    }

    fn is_total_order(&self) -> bool {
        (0..self.pieces).all(|later| self.pasts[later] == (1 << later) - 1)
    }
}

fn set_of(ran: &[String]) -> u64 {
    ran.iter().fold(0, |set, name| {
        set | 1
            << name
                .parse::<u32>()
                .expect("pieces are called by their number")
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_program_runs_as_cuda_allows_and_races_are_found_exactly(
        steps in steps(),
        seed in any::<u64>(),
        schedule in prop::sample::select(vec![Schedule::Random, Schedule::Lazy, Schedule::Eager]),
    ) {
        let bench = bench(Config { schedule, ..config(seed) });
        let mut streams: Vec<CUstream> = vec![std::ptr::null_mut()];
        let make = |stream| if is_blocking(stream) { bench.blocking_stream() } else { bench.stream() };
        streams.extend((1..STREAMS).map(make));
        let events: Vec<CUevent> = (0..EVENTS).map(|_| bench.event()).collect();
        let mut oracle = Oracle::default();
        for step in steps {
            let code = match step {
                Step::Run(stream) => {
                    bench.write(streams[stream], &oracle.pieces.to_string());
                    SUCCESS
                }
                Step::Record(stream, event) => cuEventRecord(events[event], streams[stream]),
                Step::Wait(stream, event) => cuStreamWaitEvent(streams[stream], events[event], 0),
                Step::SynchronizeStream(stream) => cuStreamSynchronize(streams[stream]),
                Step::SynchronizeEvent(event) => cuEventSynchronize(events[event]),
            };
            prop_assert_eq!(code, SUCCESS);
            let must = oracle.step(step);
            prop_assert_eq!(must & !set_of(&bench.ran()), 0, "{:?} left work behind", step);
        }
        prop_assert_eq!(cuCtxSynchronize(), SUCCESS);
        let ran = bench.ran();
        prop_assert_eq!(ran.len(), oracle.pieces);
        for (index, name) in ran.iter().enumerate() {
            let past = oracle.pasts[name.parse::<usize>().expect("pieces are called by their number")];
            prop_assert_eq!(past & !set_of(&ran[..index]), 0, "{} runs too early in {:?}", name, ran);
        }
        prop_assert_eq!(bench.findings().is_empty(), oracle.is_total_order(), "{:?}", ran);
    }
}

#[test]
fn every_order_that_cuda_allows_occurs() {
    let orders: std::collections::BTreeSet<String> = (0..200)
        .map(|seed| {
            let bench = bench(config(seed));
            let (first, second) = (bench.stream(), bench.stream());
            bench.run(first, "a");
            bench.run(second, "x");
            bench.order(first, second);
            bench.run(first, "b");
            bench.run(second, "y");
            assert_eq!(cuCtxSynchronize(), SUCCESS);
            bench.ran().concat()
        })
        .collect();
    // a before b, x before y, a before y: of the six interleavings, all but the one that begins
    // with x and y.
    assert_eq!(
        orders.into_iter().collect::<Vec<_>>(),
        ["abxy", "axby", "axyb", "xaby", "xayb"]
    );
}
