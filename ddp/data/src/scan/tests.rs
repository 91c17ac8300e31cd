//! Moments against plain sums, the same bits however the work is divided, and which error is found
//! first.

use proptest::prelude::*;

use crate::ranks::tests::ranks;
use crate::sampler::{Draws, derive};
use crate::scan::*;

/// Rows that are a function of their number.
struct Drawn {
    rows: u64,
    width: usize,
    /// At this row and feature stands NaN.
    bad: Vec<(u64, usize)>,
}

impl Drawn {
    fn read(&self, first: u64, into: &mut [f32]) -> Result<()> {
        for (row, x) in (first..).zip(into.chunks_exact_mut(self.width)) {
            assert!(row < self.rows);
            let mut draws = Draws(derive(7, row));
            x.iter_mut()
                .enumerate()
                .for_each(|(column, x)| *x = draws.normal() * 3.0 + 100.0 * column as f32);
            self.bad
                .iter()
                .filter(|bad| bad.0 == row)
                .for_each(|bad| x[bad.1] = f32::NAN);
        }
        Ok(())
    }
}

fn found(rows: &Drawn, size: usize, bytes_max: u64) -> Found {
    let all = ranks(size, |world| {
        let read = |first, into: &mut [f32]| rows.read(first, into);
        features(
            (rows.rows, rows.width),
            &read,
            &|row| row % 3 != 0,
            world,
            bytes_max,
        )
        .unwrap()
    });
    all.iter()
        .for_each(|of_rank| assert!(*of_rank == all[0], "all ranks know the same"));
    all.into_iter().next().unwrap()
}

#[test]
fn moments_are_those_of_the_rows_that_are_trained_on() {
    let rows = Drawn {
        rows: 30_001,
        width: 5,
        bad: Vec::new(),
    };
    let Found {
        moments,
        bad,
        is_complete,
        ..
    } = found(&rows, 1, u64::MAX);
    assert!((bad, is_complete, moments.count) == (None, true, 20_000));
    let mut x = vec![0.0; 30_001 * 5];
    rows.read(0, &mut x).unwrap();
    for column in 0..5 {
        let values: Vec<f64> = (0..30_001)
            .filter(|row| row % 3 != 0)
            .map(|row| f64::from(x[row * 5 + column]))
            .collect();
        let mean = values.iter().sum::<f64>() / 20_000.0;
        let squares: f64 = values.iter().map(|x| (x - mean) * (x - mean)).sum();
        // Sums of 20,000 terms in another order, in f64: at most 20,000 roundings of 1e-16 of the
        // sum of sizes, 400 · 20,000.
        assert!(
            (moments.mean[column] - mean).abs() < 1e-9,
            "{} {mean}",
            moments.mean[column]
        );
        assert!(
            (moments.squares[column] / squares - 1.0).abs() < 1e-9,
            "{} {squares}",
            moments.squares[column]
        );
        let ends = values
            .iter()
            .fold((f64::MAX, f64::MIN), |(least, most), &x| {
                (least.min(x), most.max(x))
            });
        assert_eq!(
            (
                f64::from(moments.least[column]),
                f64::from(moments.greatest[column])
            ),
            ends
        );
    }
}

#[test]
fn however_many_ranks_share_them_moments_have_the_same_bits() {
    for (rows, width) in [(30_000, 5), (7, 3), (1, 1), (500, 3000)] {
        let rows = Drawn {
            rows,
            width,
            bad: Vec::new(),
        };
        let one = found(&rows, 1, u64::MAX);
        for size in [2, 3, 7] {
            assert!(
                found(&rows, size, u64::MAX) == one,
                "{size} ranks, {} rows",
                rows.rows
            );
        }
    }
}

#[test]
fn the_first_bad_place_is_named_by_all_ranks() {
    let rows = Drawn {
        rows: 100_000,
        width: 5,
        bad: vec![(99_999, 0), (60_001, 4), (60_001, 2), (80_000, 1)],
    };
    for size in [1, 2, 3] {
        assert_eq!(
            found(&rows, size, u64::MAX).bad,
            Some((60_001, 2)),
            "{size} ranks"
        );
    }
}

#[test]
fn much_is_looked_at_in_part_spread_over_all_rows() {
    let rows = Drawn {
        rows: 1_000_000,
        width: 5,
        bad: Vec::new(),
    };
    let part = found(&rows, 1, 1 << 21);
    assert!(!part.is_complete);
    // A tenth of 20 MB, two thirds of it trained on.
    assert!(
        (60_000..70_000).contains(&part.moments.count),
        "{}",
        part.moments.count
    );
    assert!(found(&rows, 3, 1 << 21) == part);
    let (whole, count) = (found(&rows, 1, u64::MAX), part.moments.count as f64);
    for column in 0..5 {
        // The mean of `count` draws of deviation 3 is off by 3/√count: five of those.
        let off = part.moments.mean[column] - whole.moments.mean[column];
        assert!(off.abs() < 15.0 / count.sqrt(), "{off}");
    }
}

proptest! {
    #[test]
    fn every_row_is_in_one_block(rows in 1u64..5_000_000, width in prop_oneof![1usize..100_000, 1usize..1 << 24]) {
        let plan = BlockPlan::new(rows, width, u64::MAX);
        let mut next = 0;
        for segment in 0..plan.segments {
            for block in plan.blocks_of(segment) {
                prop_assert!(block.start == next && block.end > block.start);
                next = block.end;
            }
        }
        let bytes = (8 + 24 * width) as u64;
        prop_assert_eq!(next, rows);
        prop_assert!(bytes * plan.segments <= SEGMENTS_BYTES.max(bytes));
    }

    #[test]
    fn the_first_number_that_is_not_finite_is_found(length in 1usize..2000, at in 0usize..2000, what in 0usize..3) {
        let mut x = vec![1.5f32; length];
        prop_assert_eq!(first_nonfinite(&x), None);
        if at < length {
            x[at] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][what];
            x[length - 1] = f32::NAN;
            prop_assert_eq!(first_nonfinite(&x), Some(at));
        }
    }
}
