//! Claims about generated rows.

use crate::built_in::BuiltIn;
use crate::spec::ROWS_MAX;
use crate::{Dataset, read_rows};

fn pair(text: &str) -> (BuiltIn, BuiltIn) {
    let [train, held_out] = BuiltIn::pair(&text.parse().unwrap()).unwrap();
    (train, held_out)
}

fn classes(data: &BuiltIn, rows: &[u64]) -> (Vec<f32>, Vec<i64>) {
    let [x, targets] = read_rows(data, rows).unwrap();
    (x.to_vec().unwrap(), targets.to_vec().unwrap())
}

fn values(data: &BuiltIn, rows: &[u64]) -> (Vec<f32>, Vec<f32>) {
    let [x, targets] = read_rows(data, rows).unwrap();
    (x.to_vec().unwrap(), targets.to_vec().unwrap())
}

#[test]
fn a_row_is_the_same_in_any_company() {
    let (train, _) = pair("synthetic:classification,features=37,rows=1000000000000");
    let rows = [0, 17, ROWS_MAX - 1, 5];
    let (x, targets) = classes(&train, &rows);
    for (index, &row) in rows.iter().enumerate() {
        let (one, class) = classes(&train, &[row]);
        assert_eq!(
            (one.as_slice(), class[0]),
            (&x[index * 37..][..37], targets[index])
        );
    }
}

#[test]
fn every_class_comes_and_held_out_rows_are_others() {
    let (train, held_out) = pair("synthetic:classification,features=16,classes=5");
    let rows: Vec<u64> = (0..2000).collect();
    let (x, targets) = classes(&train, &rows);
    for class in 0..5 {
        let count = targets.iter().filter(|&&target| target == class).count();
        assert!(count > 40, "class {class} has {count} of 2000 rows");
    }
    let (held, _) = classes(&held_out, &rows);
    assert!(x.chunks(16).zip(held.chunks(16)).all(|(a, b)| a != b));
    assert_ne!(
        train.fingerprint().unwrap(),
        held_out.fingerprint().unwrap()
    );
}

#[test]
fn targets_have_a_deviation_of_about_one_and_noise_adds_what_it_says() {
    let rows: Vec<u64> = (0..4000).collect();
    let (_, clean) = values(&pair("synthetic:regression,outputs=8,noise=0").0, &rows);
    let (_, noisy) = values(&pair("synthetic:regression,outputs=8,noise=0.5").0, &rows);
    let mean_square =
        |values: &[f32]| values.iter().map(|v| f64::from(v * v)).sum::<f64>() / values.len() as f64;
    // A teacher of 32 hidden units is itself drawn: its outputs' mean squares scatter by some tens
    // of percent.
    assert!(
        (0.3..3.0).contains(&mean_square(&clean)),
        "{}",
        mean_square(&clean)
    );
    let noise: Vec<f32> = clean
        .iter()
        .zip(&noisy)
        .map(|(clean, noisy)| noisy - clean)
        .collect();
    // 32,000 draws: the mean square is known to √((2.7 − 1)/32000) = 0.7%. Five of those.
    assert!(
        (mean_square(&noise) / 0.25 - 1.0).abs() < 0.037,
        "{}",
        mean_square(&noise)
    );
}

#[test]
fn rows_have_the_bits_they_have_on_every_machine() {
    // Written down once: a change of these numbers changes the data.
    let (train, _) = pair("synthetic:regression,features=33,outputs=2,seed=3");
    assert_eq!(
        train.fingerprint().unwrap().split(' ').next_back(),
        Some("f424aa9a0d5b1fbc")
    );
    let (train, _) = pair("synthetic:classification,features=100");
    assert_eq!(
        train.fingerprint().unwrap().split(' ').next_back(),
        Some("b24225451344c489")
    );
}
