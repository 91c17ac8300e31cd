//! Claims about the detector, compared with a naive one that keeps every access of every byte.

use proptest::prelude::*;

use super::*;

fn writes(range: Range<Address>) -> Touched {
    Touched {
        writes: vec![range],
        ..Touched::default()
    }
}

fn reads(range: Range<Address>) -> Touched {
    Touched {
        reads: vec![range],
        ..Touched::default()
    }
}

fn atomics(range: Range<Address>) -> Touched {
    Touched {
        atomics: vec![range],
        ..Touched::default()
    }
}

#[test]
fn a_wait_for_an_event_orders_what_was_before_its_record_and_not_what_came_after() {
    let mut detector = Detector::default();
    let (a, b) = (detector.actor(), detector.actor());
    assert_eq!(detector.access(a, 1, &writes(0..100)), None);
    let event = detector.snapshot(a);
    assert_eq!(detector.access(a, 2, &writes(100..200)), None);
    detector.join(b, &event);
    assert_eq!(detector.access(b, 3, &reads(0..100)), None);
    let race = detector
        .access(b, 4, &reads(90..150))
        .expect("nothing orders 2 and 4");
    assert_eq!(race.range, 100..150);
    assert_eq!(
        (
            race.first,
            race.first_writes,
            race.second,
            race.second_writes
        ),
        (2, true, 4, false)
    );
}

#[test]
fn reads_do_not_race_with_reads_nor_atomics_with_atomics() {
    let mut detector = Detector::default();
    let [a, b, c] = [(); 3].map(|()| detector.actor());
    assert_eq!(detector.access(a, 1, &reads(0..8)), None);
    assert_eq!(detector.access(b, 2, &reads(0..8)), None);
    assert_eq!(detector.access(a, 3, &atomics(8..16)), None);
    assert_eq!(detector.access(b, 4, &atomics(8..16)), None);
    let race = detector
        .access(c, 5, &atomics(4..12))
        .expect("an atomic against a read");
    assert_eq!(
        (race.range, race.first_writes, race.second_atomic),
        (4..8, false, true)
    );
    let race = detector
        .access(c, 6, &reads(12..16))
        .expect("a read against an atomic");
    assert_eq!(
        (race.range, race.first_atomic, race.second_writes),
        (12..16, true, false)
    );
}

#[test]
fn an_atomic_after_a_read_does_not_hide_the_read_from_another_atomic() {
    let mut detector = Detector::default();
    let (a, b) = (detector.actor(), detector.actor());
    assert_eq!(detector.access(a, 1, &reads(0..4)), None);
    assert_eq!(detector.access(a, 2, &atomics(0..4)), None);
    assert_eq!(
        detector.access(b, 3, &atomics(0..4)).map(|race| race.first),
        Some(1)
    );
}

#[test]
fn every_unordered_reader_is_remembered_until_a_write() {
    let mut detector = Detector::default();
    let [a, b, c] = [(); 3].map(|()| detector.actor());
    detector.access(a, 1, &reads(0..4));
    detector.access(b, 2, &reads(0..4));
    let of_b = detector.snapshot(b);
    detector.join(c, &of_b);
    assert_eq!(
        detector.access(c, 3, &writes(0..4)).map(|race| race.first),
        Some(1)
    );
}

#[test]
fn new_memory_is_for_those_ordered_behind_its_allocation_and_freed_memory_has_no_past() {
    let mut detector = Detector::default();
    let (a, b) = (detector.actor(), detector.actor());
    detector.allocate(1000..2000, a, 1);
    assert_eq!(detector.access(a, 2, &writes(1000..1500)), None);
    assert_eq!(
        detector
            .access(b, 3, &reads(1600..1601))
            .map(|race| race.first),
        Some(1)
    );
    let race = detector
        .free(1000..2000, a, 4)
        .expect("the free is not ordered behind the read by b");
    assert_eq!(
        (race.range, race.first, race.second_writes),
        (1600..1601, 3, true)
    );
    detector.allocate(1000..2000, b, 5);
    assert_eq!(detector.access(b, 6, &reads(1000..2000)), None);
    assert_eq!(detector.shadow.segments(), 1);
}

#[test]
fn an_ended_actor_still_races_until_ordered_with_all() {
    let mut detector = Detector::default();
    let (host, other) = (detector.actor(), detector.actor());
    let mut ends = Vec::new();
    for branch in 0..100u64 {
        let actor = detector.actor();
        detector.access(actor, branch, &writes(branch * 8..branch * 8 + 8));
        ends.push(detector.snapshot(actor));
        detector.retire(actor);
    }
    for end in &ends {
        detector.join(host, end);
    }
    assert_eq!(detector.access(host, 100, &reads(0..800)), None);
    assert_eq!(
        detector
            .access(other, 101, &reads(0..8))
            .map(|race| race.first),
        Some(0)
    );
    let all = detector.snapshot(host);
    detector.join(other, &all);
    detector.settle();
    assert_eq!(detector.waiting.len(), 0);
    assert_eq!(detector.live(host).entries().count(), 1);
    assert_eq!(
        detector
            .access(other, 102, &writes(0..800))
            .map(|race| race.first),
        None
    );
    detector.join(other, &ends[5]);
    assert_eq!(detector.live(other).entries().count(), 2);
}

/// Every access of every byte: clocks are whole vectors, histories whole lists.
#[derive(Default)]
struct Naive {
    clocks: Vec<Vec<u64>>,
    bytes: Vec<Vec<(usize, u64, OperationId, AccessKind)>>,
}

impl Naive {
    fn races(
        &mut self,
        actor: usize,
        operation: OperationId,
        touched: &Touched,
    ) -> Vec<(Address, OperationId)> {
        let mut found = Vec::new();
        let kinds = [
            (AccessKind::Write, &touched.writes),
            (AccessKind::Atomic, &touched.atomics),
            (AccessKind::Read, &touched.reads),
        ];
        for (kind, ranges) in kinds {
            for byte in ranges.iter().cloned().flatten() {
                for &(other, time, first, first_kind) in &self.bytes[byte as usize] {
                    let conflict = match (first_kind, kind) {
                        (AccessKind::Read, AccessKind::Read)
                        | (AccessKind::Atomic, AccessKind::Atomic) => false,
                        _ => first != operation,
                    };
                    if conflict && self.clocks[actor][other] < time {
                        found.push((byte, first));
                    }
                }
            }
        }
        for (kind, ranges) in kinds {
            for byte in ranges.iter().cloned().flatten() {
                let time = self.clocks[actor][actor];
                self.bytes[byte as usize].push((actor, time, operation, kind));
            }
        }
        found
    }
}

#[derive(Clone, Debug)]
enum Step {
    Touch {
        actor: usize,
        kinds: [u8; 2],
        start: u64,
        length: u64,
        stride: u64,
        rows: u64,
    },
    Order {
        from: usize,
        to: usize,
    },
}

const ACTORS: usize = 4;
const BYTES: u64 = 96;

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0..ACTORS, [0..3u8, 0..3u8], 0..48u64, 1..16u64, 0..20u64, 1..3u64)
            .prop_map(|(actor, kinds, start, length, stride, rows)| Step::Touch { actor, kinds, start, length, stride, rows }),
        3 => (0..ACTORS, 0..ACTORS).prop_map(|(from, to)| Step::Order { from, to }),
    ]
}

proptest! {
    /// A race is reported exactly if there is one, and the two reported operations race on the
    /// whole reported range.
    #[test]
    fn the_race_detector_agrees_with_one_that_forgets_nothing(steps in proptest::collection::vec(step(), 1..60)) {
        let mut detector = Detector::default();
        let actors: Vec<Actor> = (0..ACTORS).map(|_| detector.actor()).collect();
        let mut naive = Naive { clocks: vec![vec![0; ACTORS]; ACTORS], bytes: vec![Vec::new(); BYTES as usize] };
        for actor in 0..ACTORS {
            naive.clocks[actor][actor] = 1;
        }
        for (operation, step) in steps.into_iter().enumerate() {
            match step {
                Step::Order { from, to } => {
                    let snapshot = detector.snapshot(actors[from]);
                    detector.join(actors[to], &snapshot);
                    let theirs = naive.clocks[from].clone();
                    naive.clocks[from][from] += 1;
                    for (own, their) in naive.clocks[to].iter_mut().zip(theirs) {
                        *own = (*own).max(their);
                    }
                }
                Step::Touch { actor, kinds, start, length, stride, rows } => {
                    let mut touched = Touched::default();
                    for row in 0..rows {
                        let range = start + row * stride..start + row * stride + length;
                        match kinds[row as usize % 2] {
                            0 => touched.reads.push(range),
                            1 => touched.writes.push(range),
                            _ => touched.atomics.push(range),
                        }
                    }
                    let expected = naive.races(actor, operation as u64, &touched);
                    let race = detector.access(actors[actor], operation as u64, &touched);
                    prop_assert_eq!(race.is_some(), !expected.is_empty());
                    if let Some(race) = race {
                        prop_assert!(race.range.clone().all(|byte| expected.contains(&(byte, race.first))));
                        prop_assert_eq!(Some(race.range.start), expected.iter().map(|found| found.0).min());
                        // The detector continues as if there had been no race; the naive one keeps
                        // all. They diverge here.
                        return Ok(());
                    }
                    // No more segments than places where the history can change.
                    prop_assert!(detector.shadow.segments() as u64 <= BYTES);
                }
            }
        }
    }
}

/// For how many hundredths of a second this thread has run: others that run do not count.
fn cpu_time() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let (_, after_name) = stat.rsplit_once(')').unwrap();
    let mut fields = after_name.split_whitespace().skip(11);
    let mut next = || fields.next().unwrap().parse::<u64>().unwrap();
    next() + next()
}

/// The order of growth is asserted. Ten megabytes byte by byte would take over ten milliseconds of
/// this thread; a thousand rows that each copy the map, over a second.
#[test]
fn the_cost_of_large_accesses_depends_on_pattern_not_bytes() {
    let mut detector = Detector::default();
    let (a, b) = (detector.actor(), detector.actor());
    let rows = |first: u64| {
        (0..1000u64)
            .map(|row| first + row * 4096..first + row * 4096 + 128)
            .collect::<Vec<_>>()
    };
    let start = cpu_time();
    for operation in 0..1000 {
        detector.access(a, operation, &writes(0..10 << 20));
    }
    let contiguous = cpu_time() - start;
    assert!(contiguous < 100, "1000 contiguous writes: {contiguous}");
    let seen = detector.snapshot(a);
    detector.join(b, &seen);
    let start = cpu_time();
    for operation in 0..20 {
        let touched = Touched {
            reads: rows(operation * 128),
            ..Touched::default()
        };
        assert_eq!(detector.access(b, 1000 + operation, &touched), None);
    }
    let strided = cpu_time() - start;
    assert!(strided < 100, "20 strided reads: {strided}");
    let seen = detector.snapshot(b);
    detector.join(a, &seen);
    assert_eq!(detector.access(a, 2000, &writes(0..10 << 20)), None);
    assert_eq!(detector.shadow.segments(), 1);
}
