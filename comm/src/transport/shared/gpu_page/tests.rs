use super::*;
use crate::transport::shared::Segment;

fn pages() -> GpuPages {
    GpuPages::new(&Board::new(&Segment::in_process(2).unwrap()), 3)
}

#[test]
fn marks_of_a_rank_are_read_by_the_others() {
    let pages = pages();
    assert_eq!((pages.read(1), pages.joining(1)), (Marks::default(), 0));
    let told = |number: u32| ReportedWork {
        number,
        call: 7 * number,
        chain: !number,
        place: 3,
    };
    let mut marks = Marks::default();
    marks.lanes[COLLECTIVES] = LaneMarks {
        begun: 70,
        call: 490,
        ended: 69,
    };
    marks.lanes[PAIRS] = LaneMarks {
        begun: u32::MAX,
        call: 5,
        ended: u32::MAX,
    };
    marks.ring = (7..71).map(told).collect();
    pages.publish(1, &marks);
    pages.show_joining(1);
    pages.show_joining(1);
    let mut read = pages.read(1);
    read.ring.sort_by_key(|told| told.number);
    assert_eq!((read, pages.joining(1)), (marks, 2));
    pages.set_joined(1);
    assert_eq!(pages.joining(1), JOINED);
    assert_eq!((pages.read(0), pages.joining(0)), (Marks::default(), 0));
}

#[test]
fn every_nth_old_mark_is_kept() {
    let pages = pages();
    let told = |number: u32| ReportedWork {
        number,
        call: number,
        chain: !number,
        place: 0,
    };
    let length = (STRIDE * SPARSE) as u32;
    // As the device tells it: the last ones, and those of the strides, in whatever order.
    for last in (1..3 * length).step_by(50) {
        let strides = (1..=last)
            .rev()
            .filter(|number| number % STRIDE as u32 == 0)
            .take(SPARSE);
        let dense = (last.saturating_sub(RING as u32 - 1).max(1)..=last).map(told);
        pages.publish(
            0,
            &Marks {
                ring: strides.map(told).chain(dense).collect(),
                ..Marks::default()
            },
        );
        let read = pages.read(0).ring;
        assert!(read.iter().all(|one| *one == told(one.number)) && read.contains(&told(last)));
        if last > length {
            // Ranks that are at most this many collectives apart have a number in common.
            for other in (last - length..last - STRIDE as u32).step_by(37) {
                let common =
                    |one: &ReportedWork| (other..other + STRIDE as u32).contains(&one.number);
                assert!(read.iter().any(common), "{last} {other}");
            }
        }
    }
}

#[test]
fn a_ring_that_is_being_written_shows_only_whole_marks() {
    let pages = pages();
    let told = ReportedWork {
        number: 5,
        call: 1,
        chain: 2,
        place: 3,
    };
    pages.publish(
        0,
        &Marks {
            ring: vec![told],
            ..Marks::default()
        },
    );
    // The next lap has come to the first word alone.
    pages
        .word(0, RING_AT + 5 * RING_WORDS)
        .store(69 << 32 | 9, Ordering::Relaxed);
    assert_eq!(pages.read(0).ring, []);
}

#[test]
fn the_newest_names_of_calls_are_kept() {
    let pages = pages();
    assert_eq!(pages.name_of(0, 0), None);
    for key in [0, 1, u32::MAX] {
        pages.name(0, key, (key == 1).then_some(3), &format!("call {key}"));
    }
    assert_eq!(pages.name_of(0, 0), Some(("call 0".into(), None)));
    assert_eq!(pages.name_of(0, 1), Some(("call 1".into(), Some(3))));
    assert_eq!(
        pages.name_of(0, u32::MAX),
        Some((format!("call {}", u32::MAX), None))
    );
    assert_eq!(pages.name_of(1, 0), None);
    pages.name(1, 9, None, &"é".repeat(200));
    assert_eq!(
        pages.name_of(1, 9),
        Some(("é".repeat(TEXT_BYTES_MAX / 2), None))
    );
    for key in 100..10_000 {
        pages.name(1, key, None, &format!("call {key}"));
        assert!(pages.is_named(1, key) && !pages.is_named(0, key));
        assert_eq!(pages.name_of(1, key).unwrap().0, format!("call {key}"));
    }
}
