//! Claims about the order of rows.

use std::collections::BTreeMap;

use proptest::prelude::*;

mod draws;
mod split;

use super::*;

fn sampler(rows: u64, batch: u64) -> Sampler {
    Sampler::new(rows, batch, 5, false).unwrap()
}

/// 1, 2, 3, and the powers of two with their neighbours.
fn awkward_sizes(up_to: u64) -> Vec<u64> {
    let powers = (2..u64::BITS)
        .map(|bit| 1u64 << bit)
        .take_while(|&power| power < up_to);
    [1, 2, 3]
        .into_iter()
        .chain(powers.flat_map(|power| [power - 1, power, power + 1]))
        .collect()
}

#[test]
fn every_row_comes_exactly_once_at_every_small_size() {
    for rows in awkward_sizes(5000).into_iter().chain([100, 1000, 4097]) {
        let order = sampler(rows, 10).permutation(3);
        let mut seen = vec![false; rows as usize];
        for position in 0..rows {
            let row = order.row(position);
            assert!(
                !std::mem::replace(&mut seen[row as usize], true),
                "row {row} of {rows} twice"
            );
            assert_eq!(order.position(row), position);
        }
    }
}

#[test]
fn without_a_seed_rows_stay_in_order() {
    for rows in awkward_sizes(5000) {
        let sampler = Sampler::with_order(rows, 128, None, false).unwrap();
        let order = sampler.permutation(3);
        assert!((0..rows).all(|row| order.row(row) == row && order.position(row) == row));
    }
}

#[test]
fn positions_of_huge_data_come_back_from_their_rows() {
    for rows in awkward_sizes(u64::MAX)
        .into_iter()
        .filter(|&rows| rows > 5000)
        .chain([1_000_000_000, 1 << 63, u64::MAX])
    {
        let order = sampler(rows, 128).permutation(0);
        for sample in 0..20 {
            let position = mix(sample) % rows;
            let row = order.row(position);
            assert!(row < rows);
            assert_eq!(order.position(row), position, "{rows} rows");
        }
        assert_eq!(order.position(order.row(rows - 1)), rows - 1);
    }
}

#[test]
fn an_epoch_on_any_number_of_ranks_is_the_same_rows_in_the_same_order() {
    let sampler = sampler(1000, 64);
    let epoch_on = |size: usize| {
        let mut rows = Vec::new();
        for step in sampler.steps_per_epoch()..2 * sampler.steps_per_epoch() {
            let place = sampler.at(step);
            assert_eq!(place.epoch, 1);
            let order = sampler.permutation(place.epoch);
            for rank in 0..size {
                rows.extend(
                    share(&place.positions, rank, size).map(|position| order.row(position)),
                );
            }
        }
        rows
    };
    let alone = epoch_on(1);
    for size in [2, 3, 4, 7, 64, 100] {
        assert_eq!(epoch_on(size), alone, "{size} ranks");
    }
    let mut sorted = alone.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
}

#[test]
fn the_short_batch_is_kept_unless_dropped() {
    let keeps = sampler(1000, 64);
    assert_eq!(keeps.steps_per_epoch(), 16);
    assert_eq!(
        keeps.at(15),
        BatchPlace {
            epoch: 0,
            in_epoch: 15,
            positions: 960..1000
        }
    );
    assert_eq!(
        keeps.at(16),
        BatchPlace {
            epoch: 1,
            in_epoch: 0,
            positions: 0..64
        }
    );
    let drops = Sampler::new(1000, 64, 5, true).unwrap();
    assert_eq!(drops.steps_per_epoch(), 15);
    assert_eq!(
        drops.at(15),
        BatchPlace {
            epoch: 1,
            in_epoch: 0,
            positions: 0..64
        }
    );
    assert_eq!(
        sampler(10, 64).at(3),
        BatchPlace {
            epoch: 3,
            in_epoch: 0,
            positions: 0..10
        }
    );
    assert_eq!(sampler(10, 64).batch(), 10);
}

#[test]
fn impossible_settings_are_refused_with_help() {
    let text = Sampler::new(10, 64, 0, true).unwrap_err().to_string();
    assert!(
        text.contains("`drop-last`") && text.contains("`batch-size` to 10 or less"),
        "{text}"
    );
    assert_eq!(Sampler::new(0, 64, 0, false).unwrap_err().exit_code(), 65);
    assert_eq!(Sampler::new(10, 0, 0, false).unwrap_err().exit_code(), 2);
}

#[test]
fn epochs_and_seeds_have_orders_of_their_own() {
    let order = |seed: u64, epoch: u64| {
        let order = Sampler::new(500, 10, seed, false)
            .unwrap()
            .permutation(epoch);
        (0..500)
            .map(|position| order.row(position))
            .collect::<Vec<_>>()
    };
    let orders = [
        order(0, 0),
        order(0, 1),
        order(1, 0),
        order(1, 1),
        order(0, 2),
        order(2, 0),
    ];
    for (index, one) in orders.iter().enumerate() {
        assert_eq!(
            *one,
            [
                order(0, 0),
                order(0, 1),
                order(1, 0),
                order(1, 1),
                order(0, 2),
                order(2, 0)
            ][index]
        );
        for other in &orders[..index] {
            // Two random orders agree at one position on average, and at more than 12 once in 10¹⁰
            // (Poisson).
            let same = one.iter().zip(other).filter(|(a, b)| a == b).count();
            assert!(same <= 12, "{same} of 500 rows in the same place");
        }
    }
}

/// Chi-square of counts that should all be `expected`.
fn chi_square(counts: &[u64], expected: f64) -> f64 {
    counts
        .iter()
        .map(|&count| (count as f64 - expected).powi(2) / expected)
        .sum()
}

/// What chi-square of `freedom` degrees exceeds by chance less than once in 10⁶: mean, plus 4.75
/// deviations √(2·freedom), plus 2/3 · 4.75² for its skew (the Wilson–Hilferty approximation to
/// second order).
fn chi_square_limit(freedom: f64) -> f64 {
    freedom + 4.75 * (2.0 * freedom).sqrt() + 15.0
}

#[test]
fn every_order_of_three_and_of_four_rows_has_the_same_chance() {
    const KEYS: u64 = 24_000;
    for rows in [3u64, 4] {
        let mut counts = std::collections::BTreeMap::new();
        for epoch in 0..KEYS {
            let order = sampler(rows, 1).permutation(epoch);
            *counts
                .entry(
                    (0..rows)
                        .map(|position| order.row(position))
                        .collect::<Vec<_>>(),
                )
                .or_insert(0u64) += 1;
        }
        let orders: u64 = (1..=rows).product();
        let counts: Vec<u64> = counts.into_values().collect();
        assert_eq!(counts.len() as u64, orders);
        let chi = chi_square(&counts, KEYS as f64 / orders as f64);
        assert!(
            chi < chi_square_limit((orders - 1) as f64),
            "{rows} rows: {chi}"
        );
    }
}

#[test]
fn every_row_has_the_same_chance_at_every_position() {
    const KEYS: u64 = 20_000;
    for rows in [2u64, 5, 8, 12] {
        let mut counts = vec![0u64; (rows * rows) as usize];
        for epoch in 0..KEYS {
            let order = sampler(rows, 1).permutation(epoch);
            (0..rows)
                .for_each(|position| counts[(position * rows + order.row(position)) as usize] += 1);
        }
        let chi = chi_square(&counts, KEYS as f64 / rows as f64);
        // A table of n × n whose rows and columns all sum to the same has (n − 1)² degrees of
        // freedom, and is scaled by n / (n − 1) against independent cells.
        let freedom = ((rows - 1) * (rows - 1)) as f64;
        assert!(
            chi * (rows - 1) as f64 / rows as f64 <= chi_square_limit(freedom),
            "{rows} rows: {chi}"
        );
    }
}

#[test]
fn neighbours_in_the_order_are_not_neighbours_in_the_data() {
    const ROWS: u64 = 1 << 20;
    const CELLS: u64 = 16;
    const SAMPLES: u64 = 100_000;
    for rows in [ROWS, ROWS - 1, 700_001] {
        let order = sampler(rows, 128).permutation(1);
        // Each pair of neighbours falls into one cell of a grid over (row, next row). A sample out
        // of a permutation is more even than one with replacement, so the limit holds for it too.
        let cell = |row: u64| row * CELLS / rows;
        let mut counts = vec![0u64; (CELLS * CELLS) as usize];
        let mut sum = 0f64;
        for position in 0..SAMPLES {
            let (row, next) = (order.row(2 * position), order.row(2 * position + 1));
            counts[(cell(row) * CELLS + cell(next)) as usize] += 1;
            let centred = |row: u64| row as f64 / rows as f64 - 0.5;
            sum += centred(row) * centred(next) * 12.0;
        }
        let chi = chi_square(&counts, SAMPLES as f64 / (CELLS * CELLS) as f64);
        assert!(
            chi < chi_square_limit((CELLS * CELLS - 1) as f64),
            "{rows} rows: {chi}"
        );
        // The correlation of n independent pairs has a deviation of 1/√n = 0.0032. Five of those.
        let correlation = sum / SAMPLES as f64;
        assert!(
            correlation.abs() < 5.0 * 0.0032,
            "{rows} rows: {correlation}"
        );
    }
}

proptest! {
    #[test]
    fn shares_are_in_order_and_leave_nothing_out(start in 0u64..u64::MAX / 2, length in 0u64..u64::MAX / 2, size in 1usize..300) {
        let positions = start..start + length;
        let mut next = start;
        for rank in 0..size {
            let piece = share(&positions, rank, size);
            prop_assert_eq!(piece.start, next);
            prop_assert!(piece.end >= piece.start);
            // No piece differs from another by more than one row.
            let rows = piece.end - piece.start;
            prop_assert!(rows == length / size as u64 || rows == length.div_ceil(size as u64));
            next = piece.end;
        }
        prop_assert_eq!(next, positions.end);
    }

    #[test]
    fn batches_of_windows_have_each_of_their_rows_once(rows in 1u64..2000, batch in 1u64..40, drop_last: bool, shuffles: bool, epoch in 0u64..1 << 40) {
        let seed = Some(7).filter(|_| shuffles);
        let Ok(sampler) = Sampler::with_order(rows, batch, seed, drop_last) else {
            return Ok(());
        };
        let (steps, mut seen) = (sampler.steps_per_epoch(), BTreeMap::<_, Vec<u64>>::new());
        for step in 0..steps {
            let place = sampler.at(epoch * steps + step);
            let (window, chosen) = sampler.window(&place);
            prop_assert_eq!(chosen.end - chosen.start, place.positions.end - place.positions.start);
            if !shuffles {
                prop_assert_eq!(window.start + chosen.start, place.positions.start);
            }
            prop_assert!(window.start <= place.positions.start && place.positions.end <= window.end);
            seen.entry((window.start, window.end)).or_default().extend(chosen);
        }
        let mut next = 0;
        for ((start, end), mut rows) in seen {
            rows.sort_unstable();
            prop_assert!(rows.into_iter().eq(0..end - start));
            prop_assert_eq!(start, next);
            next = end;
        }
        prop_assert_eq!(next, if drop_last { steps * batch } else { rows });
    }

    #[test]
    fn batches_of_an_epoch_follow_each_other_to_its_end(rows in 1u64..100_000, batch in 1u64..5000, drop_last: bool, epoch in 0u64..1 << 40) {
        let Ok(sampler) = Sampler::new(rows, batch, 0, drop_last) else {
            prop_assert!(drop_last && rows < batch);
            return Ok(());
        };
        let steps = sampler.steps_per_epoch();
        let mut next = 0;
        for in_epoch in (0..steps).take(3).chain(steps.saturating_sub(3)..steps) {
            let place = sampler.at(epoch * steps + in_epoch);
            prop_assert_eq!((place.epoch, place.in_epoch), (epoch, in_epoch));
            prop_assert_eq!(place.positions.start, in_epoch * batch);
            prop_assert!(!place.positions.is_empty());
            next = place.positions.end;
        }
        prop_assert_eq!(next, if drop_last { rows / batch * batch } else { rows });
    }

    #[test]
    fn a_random_size_and_key_is_a_bijection(rows in 1u64..3000, key: u64) {
        let order = Permutation::new(rows, key);
        let mut seen: Vec<u64> = (0..rows).map(|position| order.row(position)).collect();
        seen.sort_unstable();
        prop_assert!(seen.iter().copied().eq(0..rows));
    }
}
