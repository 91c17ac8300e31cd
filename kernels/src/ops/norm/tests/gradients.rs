//! The gradients of norms.

use super::*;

#[test]
fn gradients_are_those_of_finite_differences() {
    const STEP: f64 = 1e-5;
    for norm in NORMS {
        for (shape, scaled) in [([3, 5], true), ([18, 2], true), ([2, 33], false)] {
            let case = Case::new(norm, shape, DType::F64, scaled);
            let [_, stats] = case.forward();
            let [dx, weight_sums, bias_sums] = case.backward(&stats, true);
            let (dy, residual) = (vec::<f64>(&case.dy), vec::<f64>(&case.residual));
            // Of Σ dy · norm(x) + Σ dresidual · x.
            let loss = |case: &Case| {
                let out = vec::<f64>(&case.forward()[0]);
                let normed: f64 = out.iter().zip(&dy).map(|(a, b)| a * b).sum();
                let x = vec::<f64>(&case.x);
                normed + x.iter().zip(&residual).map(|(a, b)| a * b).sum::<f64>()
            };
            let check = |what: &str, gradient: &Tensor, change: &dyn Fn(f64, usize) -> Case| {
                for (index, got) in vec::<f64>(gradient).into_iter().enumerate() {
                    let slope = loss(&change(STEP, index)) - loss(&change(-STEP, index));
                    let slope = slope / (2.0 * STEP);
                    // h²/6 of a third derivative, large where two columns are nearly equal.
                    let bound = 1e-6 * (1.0 + slope.abs());
                    assert!(
                        (got - slope).abs() < bound,
                        "{norm:?} {what}: {got}, {slope}"
                    );
                }
            };
            let shifted = |tensor: &Tensor, step: f64, index: usize| {
                let mut values = vec::<f64>(tensor);
                values[index] += step;
                cpu_of(&values, tensor.shape().dims())
            };
            let new = || Case::new(norm, shape, DType::F64, scaled);
            check("dx", &dx, &|step, index| Case {
                x: shifted(&case.x, step, index),
                ..new()
            });
            for (sums, is_weight) in [(&weight_sums, true), (&bias_sums, false)] {
                if !scaled {
                    continue;
                }
                let gradient = case.empty(&[shape[1]]);
                column_sum_into(&gradient, sums, false).unwrap();
                check("weight or bias", &gradient, &|step, index| {
                    let mut case = new();
                    let of = if is_weight {
                        &mut case.weight
                    } else {
                        &mut case.bias
                    };
                    *of = of.as_ref().map(|of| shifted(of, step, index));
                    case
                });
            }
        }
    }
}

#[test]
fn gradients_in_f32_are_within_their_roundings_for_every_shape() {
    for (norm, shape) in NORMS
        .into_iter()
        .flat_map(|norm| SHAPES.map(|shape| (norm, shape)))
    {
        let columns = shape[1];
        let case = Case::new(norm, shape, DType::F32, true);
        let [_, stats] = case.forward();
        let [dx, weight_sums, _] = case.backward(&stats, true);
        let of_row = widened(&vec(&stats));
        let [x, dy, residual] = [&case.x, &case.dy, &case.residual].map(|of| widened(&vec(of)));
        let weight = wide(case.weight.as_ref(), columns, 1.0);
        let (mut expected, mut bounds) = (vec![], vec![]);
        let mut sums = vec![(0.0, 0.0); weight_sums.count()];
        for (index, stats) in of_row.chunks(norm.statistics()).enumerate() {
            let range = index * columns..(index + 1) * columns;
            let (center, scale) = match stats {
                [center, scale] => (*center, *scale),
                _ => (0.0, stats[0]),
            };
            let normed: Vec<f64> = x[range.clone()]
                .iter()
                .map(|x| (x - center) * scale)
                .collect();
            let g: Vec<f64> = dy[range.clone()]
                .iter()
                .zip(&weight)
                .map(|(a, b)| a * b)
                .collect();
            let along_one = match norm {
                Norm::Layer => mean(g.iter().copied()),
                Norm::Rms => 0.0,
            };
            let products = || g.iter().zip(&normed).map(|(g, n)| g * n);
            let along_x = mean(products());
            let (one_size, x_size) = (
                mean(g.iter().map(|g| g.abs())),
                mean(products().map(f64::abs)),
            );
            for (column, at) in range.enumerate() {
                let (g, n) = (g[column], normed[column]);
                expected.push(scale * (g - along_one - n * along_x) + residual[at]);
                // Sums round k times; their terms and what is done with them at most 10 times more.
                let size = scale * (g.abs() + one_size + n.abs() * x_size) + residual[at].abs();
                bounds.push(UNIT * (roundings(columns) + 10.0) * size);
                let (sum, size) = &mut sums[index / block_rows_of(shape[0]) * columns + column];
                (*sum, *size) = (*sum + dy[at] * n, *size + (dy[at] * n).abs());
            }
        }
        assert_close(&vec(&dx), &expected, |index, _| bounds[index]);
        let (sums, sizes): (Vec<f64>, Vec<f64>) = sums.into_iter().unzip();
        // Two roundings of a term and 16 of a sum.
        assert_close(&vec(&weight_sums), &sums, |index, _| {
            UNIT * 18.0 * sizes[index]
        });
    }
}

#[test]
fn backward_in_place_has_the_same_bits_and_leaves_out_what_is_not_asked_for() {
    for (norm, shape) in NORMS
        .into_iter()
        .flat_map(|norm| SHAPES.map(|shape| (norm, shape)))
    {
        let case = Case::new(norm, shape, DType::F32, true);
        let [_, stats] = case.forward();
        for with_residual in [false, true] {
            let [dx, weight_sums, _] = case.backward(&stats, with_residual);
            for in_place_of_dy in [true, false] {
                let source = if in_place_of_dy {
                    &case.dy
                } else {
                    &case.residual
                };
                let output = copy_of(source);
                let sums = weight_sums.zeros_like().unwrap();
                let gradients = NormGradients {
                    dx: &output,
                    dresidual: with_residual.then_some(if in_place_of_dy {
                        &case.residual
                    } else {
                        &output
                    }),
                    weight_sums: Some(&sums),
                    bias_sums: None,
                    row_sums: None,
                };
                let dy = if in_place_of_dy { &output } else { &case.dy };
                norm_backward_into(&gradients, dy, &case.x, &stats, &case.options()).unwrap();
                assert_eq!(vec::<f32>(&output), vec::<f32>(&dx));
                assert_eq!(vec::<f32>(&sums), vec::<f32>(&weight_sums));
            }
        }
    }
}
