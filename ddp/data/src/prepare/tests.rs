//! From files to data, on one rank and on several: the same rows, bit-identical numbers, the same
//! errors.

mod names;
mod support;
mod tokens;
mod truth;

use std::fs;
use std::path::{Path, PathBuf};

use self::support::*;
use super::*;
use crate::ranks::tests::ranks;
use crate::{
    Dataset, FeaturePlan, LabelName, Missing, Normalization, Scaling, TaskKind, TaskSpec, Trained,
    read_rows,
};
use ddp_kernels::files::testing::Scratch;

fn prepare(request: &DataRequest, ranks: &dyn Ranks) -> Result<Data> {
    super::prepare(request, None, ranks)
}

/// Many rows of three features, no two alike, and their classes.
fn many(scratch: &Scratch) -> (PathBuf, PathBuf) {
    const ROWS: usize = 50_000;
    let x: Vec<f32> = (0..ROWS)
        .flat_map(|row| [row as f32, (row * 7919 % 1000) as f32 / 7.0, -2.5])
        .collect();
    let y: Vec<i64> = (0..ROWS as i64).map(|row| row % 5).collect();
    let x = npy(
        scratch,
        "x.npy",
        "<f4",
        &[ROWS, 3],
        &bytes(&x, f32::to_le_bytes),
    );
    (x, whole(scratch, "y.npy", &y))
}

#[test]
fn normalization_has_the_same_bits_on_any_number_of_ranks() {
    let scratch = Scratch::new();
    let (x, y) = many(&scratch);
    for how in [Scaling::Standard, Scaling::Unit] {
        let mut request = request(&x, Some(&y));
        (request.normalize, request.val_split) = (how, 0.3);
        let of = |size| {
            let all = ranks(size, |world| {
                let data = prepare(&request, world).unwrap();
                (
                    data.normalization.unwrap(),
                    data.train.fingerprint().unwrap(),
                    data.held_out.fingerprint().unwrap(),
                )
            });
            assert!(all.iter().all(|of_rank| *of_rank == all[0]));
            all[0].clone()
        };
        let one = of(1);
        assert!(of(2) == one && of(3) == one, "{how:?}");
        assert!(
            how != Scaling::Standard || (one.0.shift[2], one.0.scale[2]) == (-2.5, 1.0),
            "{:?}",
            one.0
        );
    }
}

#[test]
fn rows_that_are_kept_for_evaluation_are_never_trained_on_and_the_same_on_any_number_of_ranks() {
    let scratch = Scratch::new();
    let (x, y) = many(&scratch);
    let mut request = request(&x, Some(&y));
    (request.val_split, request.seed) = (0.1, 5);
    let sides = ranks(2, |world| {
        let data = prepare(&request, world).unwrap();
        (all(&*data.train), all(&*data.held_out))
    });
    assert!(sides[0] == sides[1]);
    let (train, held_out) = &sides[0];
    assert_eq!((train.len(), held_out.len()), (45_000, 5_000));
    let mut seen: Vec<usize> = train
        .iter()
        .chain(held_out)
        .map(|(x, _)| x[0] as usize)
        .collect();
    seen.sort_unstable();
    assert!(
        seen.iter().copied().eq(0..50_000),
        "each row is on one side"
    );
    assert!(
        train
            .iter()
            .chain(held_out)
            .all(|(x, class)| *class == x[0] as i64 % 5),
        "with its own label"
    );
}

#[test]
fn statistics_are_of_the_rows_that_are_trained_on() {
    let scratch = Scratch::new();
    let (x, y) = many(&scratch);
    let mut request = request(&x, Some(&y));
    (request.normalize, request.val_split) = (Scaling::Standard, 0.5);
    let data = prepare(&request, &crate::Alone).unwrap();
    let rows = all(&*data.train);
    let mean = rows.iter().map(|(x, _)| f64::from(x[0])).sum::<f64>() / rows.len() as f64;
    let square = rows
        .iter()
        .map(|(x, _)| f64::from(x[0]).powi(2))
        .sum::<f64>()
        / rows.len() as f64;
    // Each of the numbers, near 1, is two roundings of f32 off, its mean and deviation one of
    // theirs each.
    assert!(
        mean.abs() < 1e-6 && (square - 1.0).abs() < 1e-6,
        "{mean} {square}"
    );
    let all_rows = prepare(
        &DataRequest {
            val_split: 0.0,
            ..request
        },
        &crate::Alone,
    )
    .unwrap();
    assert_ne!(all_rows.normalization, data.normalization);
}

#[test]
fn built_in_data_are_normalized_already() {
    let mut request = DataRequest::new("glyphs".parse().unwrap());
    request.normalize = Scaling::Standard;
    let error = prepare(&request, &crate::Alone).unwrap_err();
    let text = error.to_string();
    assert!(
        error.exit_code() == 2 && text.contains("`normalize`: expected files as `data`"),
        "{text}"
    );
}

/// A model that was trained on texts.
fn trained() -> Trained {
    Trained {
        task: TaskSpec::named_classes(["ant", "bee", "cow"].map(String::from).into()),
        row_shape: vec![2],
        normalization: Some(Normalization::new(vec![1.0, 2.0], vec![2.0, 0.5])),
        plan: FeaturePlan::default(),
        columns: Some(vec!["a".into(), "b".into()]),
        label: Some(LabelName::Column("kind".into())),
        needs_labels: true,
    }
}

#[test]
fn a_number_that_is_not_finite_is_found_when_a_model_reads_it() {
    let scratch = Scratch::new();
    let x = floats(&scratch, "x.npy", &[&[1.0, 6.0], &[3.0, f32::NAN]]);
    let mut request = DataRequest {
        trained: Some(trained()),
        ..request(&x, None)
    };
    request.trained.as_mut().unwrap().needs_labels = false;
    let data = prepare(&request, &crate::Alone).unwrap();
    let error = read_rows(&*data.train, &[1]).unwrap_err();
    assert!(
        error.exit_code() == 65
            && error
                .to_string()
                .contains("x.npy, row 1, feature 1: expected a finite f32, got NaN"),
        "{error}"
    );
}

#[test]
fn a_byte_that_is_no_bool_is_found_before_training() {
    let scratch = Scratch::new();
    let x = npy(&scratch, "x.npy", "|b1", &[3, 2], &[0, 1, 1, 0, 1, 2]);
    let y = whole(&scratch, "y.npy", &[0, 1, 0]);
    let error = prepare(&request(&x, Some(&y)), &crate::Alone).unwrap_err();
    let text = error.to_string();
    assert!(
        error.exit_code() == 65 && text.contains("x.npy, row 2, number 1: expected a bool"),
        "{text}"
    );
}

#[test]
fn labels_are_what_they_look_like_or_what_the_task_says() {
    let scratch = Scratch::new();
    let world = crate::Alone;
    let x = floats(&scratch, "x.npy", &[&[1.0], &[2.0], &[3.0]]);
    let fractions = |numbers: &[f32]| {
        npy(
            &scratch,
            "y.npy",
            "<f4",
            &[numbers.len()],
            &bytes(numbers, f32::to_le_bytes),
        )
    };
    let task = |y: &Path, task| {
        let request = DataRequest {
            task,
            ..request(&x, Some(y))
        };
        prepare(&request, &world)
            .map(|data| data.train.task().to_string())
            .map_err(|error| error.to_string())
    };
    let y = fractions(&[0.0, 1.0, 3.0]);
    assert_eq!(task(&y, None).unwrap(), "regression of 1 number");
    assert_eq!(
        task(&y, Some(TaskKind::Classification)).unwrap(),
        "classification into 3 classes"
    );
    let y = whole(&scratch, "z.npy", &[0, 1, 3]);
    assert_eq!(task(&y, None).unwrap(), "classification into 3 classes");
    assert_eq!(
        task(&y, Some(TaskKind::Regression)).unwrap(),
        "regression of 1 number"
    );
}

#[test]
#[ignore = "a measurement for people: prints microseconds"]
fn how_long_gathering_takes() {
    const ROWS: usize = 20_000;
    const PIXELS: usize = 784;
    let scratch = Scratch::new();
    let grey: Vec<u8> = (0..ROWS * PIXELS)
        .map(|index| (index * 31 % 251) as u8)
        .collect();
    let wide: Vec<u8> = grey
        .iter()
        .flat_map(|&grey| f32::from(grey).to_le_bytes())
        .collect();
    let y = whole(
        &scratch,
        "y.npy",
        &(0..ROWS as i64).map(|row| row % 10).collect::<Vec<_>>(),
    );
    let bytes = request(
        &npy(&scratch, "bytes.npy", "|u1", &[ROWS, PIXELS], &grey),
        Some(&y),
    );
    let floats = request(
        &npy(&scratch, "floats.npy", "<f4", &[ROWS, PIXELS], &wide),
        Some(&y),
    );
    let glyphs = DataRequest::new("glyphs".parse().unwrap());
    let normalized = |request: &DataRequest, normalize| DataRequest {
        normalize,
        ..request.clone()
    };
    for (name, request) in [
        ("glyphs", &glyphs),
        ("bytes", &bytes),
        ("bytes, unit", &normalized(&bytes, Scaling::Unit)),
        ("f32", &floats),
        ("f32, standard", &normalized(&floats, Scaling::Standard)),
    ] {
        let data = prepare(request, &crate::Alone).unwrap().train;
        let order = crate::Sampler::new(ROWS as u64, 128, 0, false)
            .unwrap()
            .permutation(0);
        let batches: Vec<Vec<u64>> = (0..150)
            .map(|batch| (0..128).map(|row| order.row(batch * 128 + row)).collect())
            .collect();
        let [x, classes] = read_rows(&*data, &[0; 128]).unwrap();
        let mut times_us: Vec<f64> = Vec::new();
        for _ in 0..3 {
            for rows in &batches {
                let started = std::time::Instant::now();
                data.gather(rows, &x, &classes).unwrap();
                times_us.push(started.elapsed().as_secs_f64() * 1e6);
            }
        }
        // The first round draws glyphs, and brings pages.
        let mut later = times_us.split_off(batches.len());
        later.sort_by(f64::total_cmp);
        println!(
            "{name}: {:.1} us for 128 rows of {PIXELS}, the median of {}",
            later[later.len() / 2],
            later.len()
        );
    }
}

#[test]
fn missing_numbers_in_arrays_are_filled_in() {
    let scratch = Scratch::new();
    let x = floats(
        &scratch,
        "x.npy",
        &[&[1.0, f32::NAN], &[f32::NAN, 4.0], &[3.0, 8.0]],
    );
    let y = whole(&scratch, "y.npy", &[0, 1, 0]);
    let mut request = request(&x, Some(&y));
    request.table.missing = Missing::Mean;
    let data = prepare(&request, &crate::Alone).unwrap();
    let expected = [
        (vec![1.0, 6.0], 0),
        (vec![2.0, 4.0], 1),
        (vec![3.0, 8.0], 0),
    ];
    assert_eq!(all(&*data.train), expected);
    request.trained = Some(names::trained_on(&data));
    assert_eq!(
        all(&*prepare(&request, &crate::Alone).unwrap().train),
        expected
    );
}
