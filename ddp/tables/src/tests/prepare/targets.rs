//! Numeric targets: standardized with the features, the same on any number of ranks.

use super::*;

/// A table of prices, from 60,000 to 243,000.
fn prices(scratch: &Scratch) -> PathBuf {
    let row = |row: u32| format!("{}.5,{}\n", row % 83, 60_000 + row % 61 * 3_050);
    let text = "size,price\n".to_string() + &(0..20_000).map(row).collect::<String>();
    let path = scratch.path().join("prices.csv");
    fs::write(&path, text).unwrap();
    path
}

/// A request for prices, of which some are held out.
fn asked(path: &Path, how: Scaling) -> DataRequest {
    DataRequest {
        task: Some(TaskKind::Regression),
        normalize: how,
        val_split: 0.3,
        ..request(path, None)
    }
}

fn targets(data: &dyn Dataset) -> Vec<f32> {
    let rows: Vec<u64> = (0..data.rows()).collect();
    let [_, targets] = read_rows(data, &rows).unwrap();
    targets.to_vec().unwrap()
}

#[test]
fn targets_get_mean_0_and_deviation_1_by_the_training_rows() {
    let scratch = Scratch::new();
    let path = prices(&scratch);
    let data = prepare(&asked(&path, Scaling::Standard), &Alone).unwrap();
    let learned = targets(&*data.train);
    let of = |power: i32| {
        learned
            .iter()
            .map(|&y| f64::from(y).powi(power))
            .sum::<f64>()
    };
    let count = learned.len() as f64;
    // Each target, near 1, is two roundings of f32 off; the mean and the deviation are one off.
    assert!((of(1) / count).abs() < 1e-6 && (of(2) / count - 1.0).abs() < 1e-6);
    // Held-out prices are scaled by the same numbers, and come back.
    let normalization = data.target_normalization.unwrap();
    let mut held_out = targets(&*data.held_out);
    normalization.undo(&mut held_out, 1);
    let plain = prepare(&asked(&path, Scaling::Unit), &Alone).unwrap();
    assert_eq!(plain.target_normalization, None);
    let plain = targets(&*plain.held_out);
    assert_eq!(plain.len(), 6_000);
    // One rounding each of the difference, the two scales and the sum, of at most 2^18.
    assert!(
        held_out
            .iter()
            .zip(&plain)
            .all(|(a, b)| (a - b).abs() < 4.0 / 64.0)
    );
}

#[test]
fn targets_are_scaled_the_same_on_any_number_of_ranks() {
    let scratch = Scratch::new();
    let request = asked(&prices(&scratch), Scaling::Standard);
    let of = |size| {
        let mut all = ranks(size, |world| {
            let data = prepare(&request, world).unwrap();
            (data.target_normalization, data.train.fingerprint().unwrap())
        });
        all.dedup();
        all
    };
    let one = of(1);
    assert!(one[0].0.is_some());
    assert!(of(2) == one && of(3) == one);
}

#[test]
fn runs_of_older_versions_keep_their_targets_and_constant_ones_become_0() {
    let scratch = Scratch::new();
    let old = DataRequest {
        normalizes_targets: false,
        ..asked(&prices(&scratch), Scaling::Standard)
    };
    let data = prepare(&old, &Alone).unwrap();
    assert!(data.normalization.is_some() && data.target_normalization.is_none());
    assert!(targets(&*data.train).iter().all(|&y| y >= 60_000.0));
    let path = scratch.path().join("constant.csv");
    fs::write(&path, "a,y,z\n1,0.1,1\n2,0.1,2\n3,0.1,3\n5,0.1,4\n").unwrap();
    let both = DataRequest {
        labels: Some("y,z".into()),
        ..asked(&path, Scaling::Standard)
    };
    let data = prepare(&both, &Alone).unwrap();
    assert!(targets(&*data.train).iter().step_by(2).all(|&y| y == 0.0));
    let normalization = data.target_normalization.unwrap();
    assert_eq!((normalization.shift[0], normalization.scale[0]), (0.1, 1.0));
}
