//! Thinning a curve to what a screen can show, so that spikes stay.

/// A place on a curve: where, and how high; none where the value was no number.
pub(super) type Point = (f64, Option<f64>);

/// The most points of a curve on the page.
pub(super) const POINTS_MAX: usize = 1000;

/// Of many points the lowest and the highest of each of `POINTS_MAX / 2` parts that follow each other, in their order; the first and the last point
/// too. A part without numbers keeps a place without one, so that the gap is seen. `points` go from left to right.
pub(super) fn thinned(points: &[Point]) -> Vec<Point> {
    if points.len() <= POINTS_MAX {
        return points.to_vec();
    }
    let part = points.len().div_ceil(POINTS_MAX / 2 - 1);
    let mut kept = Vec::with_capacity(POINTS_MAX + 2);
    kept.push(points[0]);
    for part in points[1..points.len() - 1].chunks(part) {
        let known = || part.iter().enumerate().filter_map(|(index, point)| Some((index, point.1?)));
        let lowest = known().reduce(|best, point| if point.1 < best.1 { point } else { best });
        let highest = known().reduce(|best, point| if point.1 > best.1 { point } else { best });
        match (lowest, highest) {
            (Some((low, _)), Some((high, _))) if low != high => kept.extend([part[low.min(high)], part[low.max(high)]]),
            (Some((only, _)), _) => kept.push(part[only]),
            _ => kept.push(part[0]),
        }
    }
    kept.push(points[points.len() - 1]);
    kept
}

/// Of many rows of values the means of parts that follow each other, each at its last place: for what adds up.
pub(super) fn averaged<const N: usize>(rows: &[(f64, [f64; N])]) -> Vec<(f64, [f64; N])> {
    if rows.len() <= POINTS_MAX {
        return rows.to_vec();
    }
    let mean = |part: &[(f64, [f64; N])]| {
        let sum = |index: usize| part.iter().map(|row| row.1[index]).sum::<f64>();
        (part[part.len() - 1].0, std::array::from_fn(|index| sum(index) / part.len() as f64))
    };
    rows.chunks(rows.len().div_ceil(POINTS_MAX / 2)).map(mean).collect()
}

/// The lowest and the highest of the numbers among these.
pub(super) fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.filter(|value| value.is_finite()).fold(None, |range, value| match range {
        None => Some((value, value)),
        Some((low, high)) => Some((low.min(value), high.max(value))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spikes_stay_and_order_too() {
        for count in [POINTS_MAX + 1, 12_345, 100_000] {
            let value = |step: usize| if step == count / 3 { 1e9 } else { (step as f64).sin() };
            let points: Vec<Point> = (0..count).map(|step| (step as f64, Some(value(step)))).collect();
            let kept = thinned(&points);
            assert!(kept.len() <= POINTS_MAX + 2, "{count}: {}", kept.len());
            assert!(kept.contains(&((count / 3) as f64, Some(1e9))), "{count}");
            assert_eq!((kept[0], kept[kept.len() - 1]), (points[0], points[count - 1]));
            assert!(kept.is_sorted_by(|a, b| a.0 < b.0), "{count}: each once, from left to right");
        }
    }

    #[test]
    fn a_long_gap_stays_a_gap() {
        let value = |step: usize| (!(3000..6000).contains(&step)).then_some(1.0);
        let points: Vec<Point> = (0..9000).map(|step| (step as f64, value(step))).collect();
        let kept = thinned(&points);
        assert!(kept.iter().any(|point| point.1.is_none()));
        assert!(kept.iter().all(|point| point.1.is_none() == (3000.0..6000.0).contains(&point.0)));
    }

    #[test]
    fn few_points_stay_as_they_are() {
        let points = vec![(1.0, Some(2.0)), (2.0, None)];
        assert_eq!((thinned(&points), thinned(&[])), (points, vec![]));
    }

    #[test]
    fn means_keep_the_sum() {
        let rows: Vec<(f64, [f64; 2])> = (0..4000).map(|step| (step as f64, [step as f64, 1.0])).collect();
        let kept = averaged(&rows);
        assert_eq!(kept.len(), POINTS_MAX / 2);
        assert_eq!((kept[0], kept[499].0), ((7.0, [3.5, 1.0]), 3999.0));
    }
}
