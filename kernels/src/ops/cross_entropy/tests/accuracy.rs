//! The statistics of correct rows.

use crate::ops::testing::{cpu, cpu_of, random_f32};
use crate::ops::{CrossEntropyOptions, CrossEntropyOut, cross_entropy};
use crate::{Tensor, threads};

/// Correct rows and rows, as cross-entropy adds them to the statistics of a step.
fn counts(logits: &Tensor, targets: &Tensor, ignore_index: Option<i64>) -> [i64; 2] {
    let stats = cpu(&[0.0; 4], &[4]);
    let out = CrossEntropyOut {
        losses: &cpu(&vec![0.0; targets.count()], &[targets.count()]),
        dlogits: None,
        weights: None,
    };
    let options = CrossEntropyOptions {
        ignore_index,
        ..CrossEntropyOptions::default()
    };
    cross_entropy(logits, targets, out, &options, Some(&stats)).unwrap();
    let stats = stats.to_vec::<f32>().unwrap();
    [stats[2], stats[3]].map(|count| count as i64)
}

/// torch.argmax, one comparison at a time.
fn argmax(row: &[f32]) -> usize {
    let larger = |best: usize, x: f32| !row[best].is_nan() && (x.is_nan() || x > row[best]);
    (1..row.len()).fold(0, |best, index| {
        if larger(best, row[index]) {
            index
        } else {
            best
        }
    })
}

#[test]
fn counts_are_those_of_an_argmax_for_every_shape_and_number_of_threads() {
    let _alone = crate::ops::testing::alone_with_the_pool();
    for (rows, classes) in [(0, 3), (1, 1), (7, 2), (1000, 10), (33, 31), (50, 1000)] {
        // Whole numbers in a small range, so that equal maxima are common; some NaN.
        let small = |x: &f32| {
            if *x > 2.5 {
                f32::NAN
            } else {
                (x * 2.0).round()
            }
        };
        let x: Vec<f32> = random_f32(rows * classes, 1).iter().map(small).collect();
        let best: Vec<usize> = x.chunks(classes).map(argmax).collect();
        let target = |(row, &best): (usize, &usize)| match row % 4 {
            0 => -1,
            1 => ((best + 1) % classes) as i32,
            _ => best as i32,
        };
        let y: Vec<i32> = best.iter().enumerate().map(target).collect();
        let counted = y.iter().filter(|&&y| y >= 0).count() as i64;
        let correct = y
            .iter()
            .zip(&best)
            .filter(|&(&y, &best)| y == best as i32)
            .count() as i64;
        let (logits, targets) = (cpu(&x, &[rows, classes]), cpu_of(&y, &[rows]));
        for count in [1, 2, 3] {
            threads::set_count(count).unwrap();
            assert_eq!(
                counts(&logits, &targets, Some(-1)),
                [correct, counted],
                "{rows} × {classes}"
            );
        }
    }
}

#[test]
fn the_first_of_equals_wins_and_nan_is_the_largest() {
    // torch.argmax: 0 of [2, 2], 1 of [1, nan, 3, nan].
    let tie = cpu(&[2.0, 2.0, 2.0, 2.0], &[2, 2]);
    assert_eq!(counts(&tie, &cpu_of(&[0u8, 1], &[2]), None), [1, 2]);
    let nan = cpu(&[1.0, f32::NAN, 3.0, f32::NAN].repeat(4), &[4, 4]);
    assert_eq!(counts(&nan, &cpu_of(&[0i64, 1, 2, 3], &[4]), None), [1, 4]);
    assert_eq!(
        counts(&nan, &cpu_of(&[1i64, 1, 1, 1], &[4]), Some(1)),
        [0, 0]
    );
}
