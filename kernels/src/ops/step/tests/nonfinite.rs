//! Tests of nonfinite.

use super::super::*;
use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};

#[test]
fn the_flag_keeps_the_first_bad_step_wherever_the_bad_element_is() {
    for size in SIZES {
        let mut x = random_f32(size, 1);
        let flag = cpu_of(&[0i64], &[1]);
        let step = |number: i64| cpu_of(&[number], &[1]);
        mark_nonfinite(&flag, &cpu(&x, &[size]), &step(1)).unwrap();
        assert_eq!(flag.item().unwrap(), 0.0, "all finite");
        let places = [0, size / 2, size.saturating_sub(1)];
        for (place, bad) in places
            .into_iter()
            .zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY])
        {
            let Some(element) = x.get_mut(place) else {
                continue;
            };
            let good = std::mem::replace(element, bad);
            let flag = cpu_of(&[0i64], &[1]);
            mark_nonfinite(&flag, &cpu(&x, &[size]), &step(7)).unwrap();
            mark_nonfinite(&flag, &cpu(&x, &[size]), &step(8)).unwrap();
            assert_eq!(flag.item().unwrap(), 7.0, "{bad} at {place} of {size}");
            x[place] = good;
        }
    }
}

#[test]
fn the_largest_finite_numbers_and_doubles_beyond_f32_are_fine() {
    let (flag, step) = (cpu_of(&[0i64], &[1]), cpu_of(&[1i64], &[1]));
    mark_nonfinite(
        &flag,
        &cpu(&[f32::MAX, f32::MIN, -0.0, 1e-45], &[2, 2]),
        &step,
    )
    .unwrap();
    mark_nonfinite(&flag, &cpu_of(&[1e300f64], &[]), &step).unwrap();
    assert_eq!(flag.item().unwrap(), 0.0);
    mark_nonfinite(&flag, &cpu_of(&[f64::NAN], &[1]), &step).unwrap();
    assert_eq!(flag.item().unwrap(), 1.0);
}

#[test]
fn mark_nonfinite_refuses_step_zero() {
    let flag = cpu_of(&[0i64], &[1]);
    let error = mark_nonfinite(&flag, &cpu(&[1.0], &[1]), &cpu_of(&[0i64], &[1]))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("mark_nonfinite: step: expected 1 or more")
            && error.contains("nonfinite.rs"),
        "{error}"
    );
    let error = mark_nonfinite(&cpu(&[0.0], &[1]), &flag, &flag)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("first_bad_step f32[1] on cpu: expected dtype i64"),
        "{error}"
    );
}
