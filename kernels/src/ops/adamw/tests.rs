//! Tests of adamw.

use super::*;
use crate::ops::ChunkTable;
use crate::ops::testing::{SIZES, assert_close, cpu, cpu_of, random_f32, two_chunks};
use crate::threads;

const CONSTANTS: AdamwConstants = AdamwConstants {
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-6,
};

fn scalars(step: u64) -> AdamwScalars {
    AdamwScalars {
        learning_rate: 0.01,
        weight_decay: 0.1,
        step,
    }
}

/// The textbook, in f64.
fn reference(p: &mut f64, m: &mut f64, v: &mut f64, grad: f64, decay: bool, scalars: AdamwScalars) {
    let AdamwScalars {
        learning_rate,
        weight_decay,
        step,
    } = scalars;
    if decay {
        *p -= learning_rate * weight_decay * *p;
    }
    *m = CONSTANTS.beta1 * *m + (1.0 - CONSTANTS.beta1) * grad;
    *v = CONSTANTS.beta2 * *v + (1.0 - CONSTANTS.beta2) * grad * grad;
    let m_hat = *m / (1.0 - CONSTANTS.beta1.powi(step as i32));
    let v_hat = *v / (1.0 - CONSTANTS.beta2.powi(step as i32));
    *p -= learning_rate * m_hat / (v_hat.sqrt() + CONSTANTS.epsilon);
}

/// Twenty steps of the operation and of the reference over two chunks with a gap between: values of
/// both.
fn twenty_steps<T: Float>(size: usize) -> (Vec<T>, Vec<f64>) {
    let chunks = two_chunks(size);
    let fresh =
        |seed: u64| -> Vec<f64> { random_f32(size, seed).into_iter().map(f64::from).collect() };
    let tensor = |x: &[f64]| {
        cpu_of(
            &x.iter().map(|&x| T::from_f64(x)).collect::<Vec<T>>(),
            &[size],
        )
    };
    let mut p = fresh(1);
    let (mut m, mut v) = (vec![0.0; size], vec![0.0; size]);
    let [values, first, second] = [&p, &m, &v].map(|x| tensor(x));
    let scale = cpu_of(&[0.5, 7.0].map(T::from_f64), &[2]);
    for step in 1..=20 {
        let grads = fresh(100 + step);
        for chunk in chunks.chunks() {
            for i in chunk.range() {
                reference(
                    &mut p[i],
                    &mut m[i],
                    &mut v[i],
                    0.5 * grads[i],
                    chunk.decay,
                    scalars(step),
                );
            }
        }
        let numbers = scalars(step)
            .to_array_f64(&CONSTANTS)
            .unwrap()
            .map(T::from_f64);
        let (grads, numbers) = (tensor(&grads), cpu_of(&numbers, &[4]));
        adamw(
            &UpdateTensors {
                gradient_scale: Some(&scale),
                ..UpdateTensors::new([&values, &grads], &chunks, &numbers)
            },
            [&first, &second],
            &CONSTANTS,
        )
        .unwrap();
    }
    (values.to_vec().unwrap(), p)
}

#[test]
fn twenty_steps_agree_with_f64_and_leave_the_gap_alone() {
    for size in SIZES {
        let (got, want) = twenty_steps::<f32>(size);
        // Each step rounds the value (|p| < 8) three times, ε = 2⁻²⁴ relative. The update is
        // lr × m̂/√v̂ with |g|/√v̂ <= √20; m's roundings, 4 a step, add up over 1/(1 − β₁) = 10
        // steps: under 200ε in all.
        let bound = 20.0 * (3.0 * 8.0 + 0.01 * 200.0) / f64::from(1 << 24);
        assert_close(&got, &want, |_, _| bound);
        let (got, want) = twenty_steps::<f64>(size.min(5000));
        for (got, want) in got.iter().zip(&want) {
            // The same bound with 2⁻⁵³.
            assert!(
                (got - want).abs() <= 20.0 * 26.0 * f64::EPSILON,
                "{got} {want}"
            );
        }
    }
}

/// PyTorch 2.11:
/// ```python
/// p = torch.tensor([.5, -1.25, 2., 0.], requires_grad=True)
/// o = torch.optim.AdamW([p], lr=.1, betas=(.9, .99), eps=1e-6, weight_decay=.05)
/// for g in [[.1,-.2,.3,1.], [-.4,.5,0.,-1.], [2.,-3.,.25,1e-3]]:
///     p.grad = torch.tensor(g); o.step()
/// ```
#[test]
fn pytorch_makes_the_same_three_steps() {
    let [values, first, second] =
        [[0.5, -1.25, 2.0, 0.0], [0.0; 4], [0.0; 4]].map(|x: [f32; 4]| cpu(&x, &[4]));
    for (step, grads) in [
        [0.1, -0.2, 0.3, 1.0],
        [-0.4, 0.5, 0.0, -1.0],
        [2.0, -3.0, 0.25, 1e-3],
    ]
    .iter()
    .enumerate()
    {
        let scalars = AdamwScalars {
            learning_rate: 0.1,
            weight_decay: 0.05,
            step: step as u64 + 1,
        };
        let scalars = cpu(&scalars.to_array(&CONSTANTS).unwrap(), &[4]);
        let chunks = ChunkTable::whole(4);
        adamw(
            &UpdateTensors::new([&values, &cpu(grads, &[4])], &chunks, &scalars),
            [&first, &second],
            &CONSTANTS,
        )
        .unwrap();
    }
    let want = [
        0.395_488_470_792_770_4,
        -1.119_675_397_872_924_8,
        1.723_566_532_135_01,
        -0.089_733_183_383_941_65,
    ];
    // Both sides round some ten times a step, numbers of up to 2.
    assert_close(&values.to_vec::<f32>().unwrap(), &want, |_, _| {
        3.0 * 10.0 * 2.0 / f64::from(1 << 24)
    });
}

/// Values and moments after a step on 100,003 elements.
fn one_step(flag: Option<i64>) -> Vec<u32> {
    let count = 100_003;
    let tensors = [1, 2, 3, 4].map(|seed| cpu(&random_f32(count, seed), &[count]));
    let [values, grads, first, second] = &tensors;
    let squares: Vec<f32> = second
        .to_vec::<f32>()
        .unwrap()
        .iter()
        .map(|x| x * x)
        .collect();
    let second = &second.new_zeros(&[count]).unwrap();
    second.copy_from(&cpu(&squares, &[count])).unwrap();
    let scalars = cpu(&scalars(5).to_array(&CONSTANTS).unwrap(), &[4]);
    let flag = flag.map(|flag| cpu_of(&[flag], &[1]));
    let chunks = ChunkTable::whole(count);
    adamw(
        &UpdateTensors {
            first_bad_step: flag.as_ref(),
            ..UpdateTensors::new([values, grads], &chunks, &scalars)
        },
        [first, second],
        &CONSTANTS,
    )
    .unwrap();
    [values, first, second]
        .iter()
        .flat_map(|x| x.to_vec::<f32>().unwrap())
        .map(f32::to_bits)
        .collect()
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let _alone = crate::ops::testing::alone_with_the_pool();
    threads::set_count(1).unwrap();
    let one = one_step(None);
    for count in [2, 3] {
        threads::set_count(count).unwrap();
        assert!(one_step(None) == one, "{count} threads");
    }
}

#[test]
fn a_set_flag_stops_everything_and_a_clear_one_nothing() {
    assert!(one_step(Some(0)) == one_step(None));
    let untouched = [1, 3].map(|seed| random_f32(100_003, seed)).concat();
    let stopped = one_step(Some(3));
    assert!(
        stopped
            .iter()
            .zip(&untouched)
            .all(|(&got, want)| got == want.to_bits())
    );
}

#[test]
fn arguments_that_do_not_fit_are_named() {
    let [values, grads, first, second] = [(); 4].map(|()| cpu(&[0.0; 3], &[3]));
    let four = cpu(&[0.0; 4], &[4]);
    let call = |grads: &Tensor, len: usize, constants: &AdamwConstants, scalars: &Tensor| {
        let chunks = ChunkTable::whole(len);
        adamw(
            &UpdateTensors::new([&values, grads], &chunks, scalars),
            [&first, &second],
            constants,
        )
        .unwrap_err()
        .to_string()
    };
    let text = call(&grads, 4, &CONSTANTS, &four);
    assert!(
        text.contains("values f32[3] on cpu: expected at least 4 elements"),
        "{text}"
    );
    let text = call(&four, 3, &CONSTANTS, &four);
    assert!(
        text.contains("grads f32[4] on cpu: expected shape [3], as values has"),
        "{text}"
    );
    let text = call(&grads, 3, &CONSTANTS, &grads);
    assert!(
        text.contains("scalars f32[3] on cpu: expected shape [4]"),
        "{text}"
    );
    let text = call(
        &grads,
        3,
        &AdamwConstants {
            beta2: 1.0,
            ..CONSTANTS
        },
        &four,
    );
    assert!(
        text.contains("adamw: beta2: expected at least 0 and below 1, got 1"),
        "{text}"
    );
    let text = call(&values, 3, &CONSTANTS, &four);
    assert!(text.contains("share memory"), "{text}");
    assert!(
        scalars(0)
            .to_array(&CONSTANTS)
            .unwrap_err()
            .to_string()
            .contains("steps count from 1")
    );
}

#[test]
fn with_the_flags_of_a_step_a_bad_gradient_changes_nothing_of_its_own_and_is_marked() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let buffers = [[1.0f32, 2.0, 3.0], [0.5, bad, 0.5], [0.1; 3], [0.2; 3]];
        let [values, grads, first, second] = buffers.map(|buffer| cpu(&buffer, &[3]));
        let chunks = ChunkTable::whole(3);
        let scalars = cpu(&scalars(1).to_array(&CONSTANTS).unwrap(), &[4]);
        let flags = cpu_of(&[0i64, 0, 7], &[3]);
        let step = || {
            let (constants, flags) = (&CONSTANTS, Some(&flags));
            adamw(
                &UpdateTensors {
                    first_bad_step: flags,
                    ..UpdateTensors::new([&values, &grads], &chunks, &scalars)
                },
                [&first, &second],
                constants,
            )
            .unwrap();
        };
        step();
        assert_eq!(flags.to_vec::<i64>().unwrap(), [0, 7, 7], "{bad}");
        let after: Vec<f32> = values.to_vec().unwrap();
        assert!(
            after[1] == 2.0 && after[0] != 1.0 && after[2] != 3.0,
            "{bad}: {after:?}"
        );
        for (moment, before) in [(&first, 0.1), (&second, 0.2)] {
            assert_eq!(moment.to_vec::<f32>().unwrap()[1], before, "{bad}");
        }
        // Later steps do not move the mark, and `decide_step` turns it into the first bad step.
        flags
            .with_slice_mut(|flags: &mut [i64]| flags[2] = 8)
            .unwrap();
        step();
        assert_eq!(flags.to_vec::<i64>().unwrap(), [0, 7, 8], "{bad}");
    }
}
