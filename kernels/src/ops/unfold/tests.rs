//! Tests of unfold.

use super::*;
use crate::DType;
use crate::ops::testing::{alone_with_the_pool, cpu, random_f32};

/// Windows of 3×2, 2 and 1 apart, in a padded image.
const OF: Windows = Windows {
    size: [3, 2],
    stride: [2, 1],
    padding: [1, 2],
    dilation: [1, 3],
};

/// By the definition: the element of `x` that each element of the columns is, if it is one.
fn sources([images, channels, height, width]: [usize; 4], of: &Windows) -> Vec<Option<usize>> {
    let [down, across] = of.places([height, width]).unwrap();
    let mut all = vec![];
    for row in 0..channels * of.size[0] * of.size[1] {
        let at = [row / of.size[1] % of.size[0], row % of.size[1]];
        let channel = row / of.size[1] / of.size[0];
        for place in 0..images * down * across {
            let window = [place / across % down, place % across];
            let image = place / across / down;
            let index = |axis: usize, length: usize| {
                let index = window[axis] * of.stride[axis] + at[axis] * of.dilation[axis];
                index
                    .checked_sub(of.padding[axis])
                    .filter(|index| *index < length)
            };
            let pair = index(0, height).zip(index(1, width));
            all.push(pair.map(|(h, w)| ((image * channels + channel) * height + h) * width + w));
        }
    }
    all
}

/// Images and windows: a line longer than what is summed at a time, gaps between windows, one
/// place.
fn cases() -> Vec<([usize; 4], Windows)> {
    let same = Windows {
        size: [3; 2],
        stride: [1; 2],
        padding: [1; 2],
        dilation: [1; 2],
    };
    vec![
        ([2, 3, 7, 9], OF),
        ([1, 1, 2, 600], same),
        ([3, 2, 5, 4], same),
        (
            [2, 2, 8, 8],
            Windows {
                stride: [2, 3],
                padding: [0; 2],
                size: [1, 2],
                ..same
            },
        ),
        (
            [1, 2, 3, 3],
            Windows {
                padding: [0; 2],
                ..same
            },
        ),
        ([0, 2, 3, 3], same),
    ]
}

#[test]
fn columns_and_gradients_are_by_the_definition() {
    for (shape, of) in cases() {
        let sources = sources(shape, &of);
        let rows = shape[1] * of.size[0] * of.size[1];
        let columns = [rows, sources.len() / rows];
        let count: usize = shape.iter().product();
        let (x, dout) = (random_f32(count, 1), random_f32(sources.len(), 2));
        let out = Tensor::full(&columns, 9.0, DType::F32, crate::Device::Cpu).unwrap();
        unfold_into(&out, &cpu(&x, &shape), &of).unwrap();
        let expected = sources
            .iter()
            .map(|source| source.map_or(0.0, |source| x[source]));
        assert_eq!(out.to_vec::<f32>().unwrap(), expected.collect::<Vec<f32>>());
        let dx = Tensor::full(&shape, 9.0, DType::F32, crate::Device::Cpu).unwrap();
        unfold_backward_into(&dx, &cpu(&dout, &columns), &of).unwrap();
        // In the order of rows, which is the one that is promised.
        let mut sums = vec![0.0; count];
        for (source, dout) in sources.iter().zip(&dout) {
            if let Some(source) = source {
                sums[*source] += dout;
            }
        }
        assert_eq!(dx.to_vec::<f32>().unwrap(), sums, "{shape:?} {of:?}");
    }
}

#[test]
fn bf16_is_copied_and_summed_in_f32() {
    let shape = [2, 2, 6, 5];
    let same = Windows {
        size: [3; 2],
        stride: [1; 2],
        padding: [1; 2],
        dilation: [1; 2],
    };
    let dout = cpu(&random_f32(18 * 60, 3), &[18, 60])
        .to_dtype(DType::BF16)
        .unwrap();
    let of = |dtype: DType| {
        let dx = Tensor::zeros(&shape, dtype, crate::Device::Cpu).unwrap();
        unfold_backward_into(&dx, &dout.to_dtype(dtype).unwrap(), &same).unwrap();
        dx.to_dtype(DType::BF16)
            .unwrap()
            .to_dtype(DType::F32)
            .unwrap()
            .to_vec::<f32>()
            .unwrap()
    };
    assert_eq!(of(DType::BF16), of(DType::F32));
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let _alone = alone_with_the_pool();
    let [down, across] = OF.places([20, 30]).unwrap();
    let columns = [24, 40 * down * across];
    let dout = cpu(&random_f32(columns[0] * columns[1], 4), &columns);
    let results = [1, 2, 3].map(|threads| {
        threads::set_count(threads).unwrap();
        let dx = cpu(&vec![0.0; 40 * 4 * 600], &[40, 4, 20, 30]);
        unfold_backward_into(&dx, &dout, &OF).unwrap();
        dx.to_vec::<f32>().unwrap()
    });
    assert!(results[0] == results[1] && results[0] == results[2]);
}

#[test]
fn windows_and_operands_that_do_not_fit_are_named() {
    let told = |out: &[usize], x: &[usize], of: &Windows| {
        let zeros = |shape: &[usize]| cpu(&vec![0.0; shape.iter().product()], shape);
        unfold_into(&zeros(out), &zeros(x), of)
            .unwrap_err()
            .to_string()
    };
    let error = told(&[6, 6], &[1, 1, 4, 4], &OF);
    assert!(
        error.contains("out f32[6, 6] on cpu: expected shape [6, 10]"),
        "{error}"
    );
    let unfit = [
        Windows { size: [7, 1], ..OF },
        Windows { size: [0, 1], ..OF },
        Windows {
            stride: [1, 0],
            ..OF
        },
        Windows {
            dilation: [1, 8],
            ..OF
        },
        Windows {
            dilation: [usize::MAX; 2],
            ..OF
        },
        Windows {
            padding: [usize::MAX; 2],
            ..OF
        },
    ];
    for of in unfit {
        let error = told(&[6, 6], &[1, 1, 4, 4], &of);
        assert!(
            error.contains("expected one that fits into 4×4, with a stride"),
            "{error}"
        );
    }
}
