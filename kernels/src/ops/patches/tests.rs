//! Tests of patches.

mod token_mean;

use super::*;
use crate::ops::testing::{alone_with_the_pool, cpu, random_f32};

/// Images of two channels, 4 lines and 6 columns, in patches of 2, after one token of zeros.
const PLANES: Patches = Patches {
    channels: 2,
    height: 4,
    width: 6,
    channels_last: false,
    patch: 2,
    leading: 1,
};

/// The tokens of these images.
fn tokens(x: &Tensor, patches: &Patches) -> Vec<f32> {
    let shape = [x.shape()[0], patches.tokens(), patches.columns()];
    let out = Tensor::full(&shape, 9.0, x.dtype(), x.device()).unwrap();
    patches_into(&out, x, patches).unwrap();
    out.to_vec().unwrap()
}

#[test]
fn each_patch_has_its_pixels_by_channel_line_and_column() {
    // A pixel's number is its place: 100 channel + 10 line + column.
    let number =
        |channel: usize, line: usize, column: usize| (100 * channel + 10 * line + column) as f32;
    let places = |order: fn([usize; 3]) -> [usize; 3], sizes: [usize; 3]| -> Vec<f32> {
        let mut numbers = vec![];
        for a in 0..sizes[0] {
            for b in 0..sizes[1] {
                for c in 0..sizes[2] {
                    let [channel, line, column] = order([a, b, c]);
                    numbers.push(number(channel, line, column));
                }
            }
        }
        numbers
    };
    let planes = places(|at| at, [2, 4, 6]);
    let mixed = places(|[line, column, channel]| [channel, line, column], [4, 6, 2]);
    let mut expected = vec![0.0; 8];
    for (down, across) in (0..2).flat_map(|down| (0..3).map(move |across| (down, across))) {
        for channel in 0..2 {
            for (line, column) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                expected.push(number(channel, 2 * down + line, 2 * across + column));
            }
        }
    }
    assert_eq!(tokens(&cpu(&planes, &[1, 48]), &PLANES), expected);
    let last = Patches {
        channels_last: true,
        ..PLANES
    };
    assert_eq!(tokens(&cpu(&mixed, &[1, 48]), &last), expected);
    let whole = Patches {
        leading: 0,
        ..PLANES
    };
    assert_eq!(tokens(&cpu(&planes, &[1, 48]), &whole), expected[8..]);
}

#[test]
fn backward_puts_each_number_where_it_was() {
    for images in [0, 1, 3] {
        for channels_last in [false, true] {
            let patches = Patches {
                channels_last,
                ..PLANES
            };
            let x = cpu(&random_f32(48 * images, 41), &[images, 48]);
            let out = cpu(&tokens(&x, &patches), &[images, 7, 8]);
            let dx = Tensor::full(&[images, 48], 9.0, x.dtype(), x.device()).unwrap();
            patches_backward_into(&dx, &out, &patches).unwrap();
            assert_eq!(dx.to_vec::<f32>().unwrap(), x.to_vec::<f32>().unwrap());
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let _alone = alone_with_the_pool();
    let x = cpu(&random_f32(48 * 2000, 42), &[2000, 48]);
    let results = [1, 2, 3].map(|threads| {
        threads::set_count(threads).unwrap();
        tokens(&x, &PLANES)
    });
    assert!(results[0] == results[1] && results[0] == results[2]);
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let told = |out: &[usize], x: &[usize], patches: &Patches| {
        let zeros = |shape: &[usize]| cpu(&vec![0.0; shape.iter().product()], shape);
        let error = patches_into(&zeros(out), &zeros(x), patches);
        error.unwrap_err().to_string()
    };
    let error = told(&[1, 7, 8], &[1, 47], &PLANES);
    assert!(
        error.contains("patches: x f32[1, 47] on cpu: expected shape [1, 48]"),
        "{error}"
    );
    let error = told(&[1, 6, 8], &[1, 48], &PLANES);
    assert!(
        error.contains("out f32[1, 6, 8] on cpu: expected shape [1, 7, 8]"),
        "{error}"
    );
    for patch in [0, 3] {
        let error = told(&[1, 7, 8], &[1, 48], &Patches { patch, ..PLANES });
        let expected = format!(
            "expected a divisor of the sides of an image, [4, 6], with channels, got {patch}"
        );
        assert!(error.contains(&expected), "{error}");
    }
}
