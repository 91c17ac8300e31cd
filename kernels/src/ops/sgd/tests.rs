//! Tests of sgd.

use super::*;
use crate::ops::ChunkTable;
use crate::ops::testing::{SIZES, assert_close, cpu, cpu_of, random_f32, two_chunks};
use crate::threads;

const SCALARS: SgdScalars = SgdScalars {
    learning_rate: 0.1,
    weight_decay: 0.05,
};
const KINDS: [SgdConstants; 3] = [
    SgdConstants {
        momentum: 0.0,
        nesterov: false,
    },
    SgdConstants {
        momentum: 0.9,
        nesterov: false,
    },
    SgdConstants {
        momentum: 0.9,
        nesterov: true,
    },
];

/// The textbook, in f64.
fn reference(p: &mut f64, buffer: &mut f64, grad: f64, decay: bool, constants: SgdConstants) {
    let grad = if decay {
        grad + SCALARS.weight_decay * *p
    } else {
        grad
    };
    *buffer = constants.momentum * *buffer + grad;
    let direction = if constants.nesterov {
        grad + constants.momentum * *buffer
    } else {
        *buffer
    };
    *p -= SCALARS.learning_rate * direction;
}

#[test]
fn twenty_steps_agree_with_f64_and_leave_the_gap_alone() {
    for (size, constants) in SIZES
        .into_iter()
        .flat_map(|size| KINDS.map(|kind| (size, kind)))
    {
        let chunks = two_chunks(size);
        let x = random_f32(size, 1);
        let mut p: Vec<f64> = x.iter().copied().map(f64::from).collect();
        let mut buffer = vec![0.0; size];
        let (values, momentum) = (cpu(&x, &[size]), cpu(&vec![0.0; size], &[size]));
        let momentum = (constants.momentum > 0.0).then_some(&momentum);
        let (scalars, scale) = (cpu(&SCALARS.to_array().unwrap(), &[2]), cpu(&[0.5], &[1]));
        for step in 0..20 {
            let grads = random_f32(size, 100 + step);
            for chunk in chunks.chunks() {
                for i in chunk.range() {
                    reference(
                        &mut p[i],
                        &mut buffer[i],
                        0.5 * f64::from(grads[i]),
                        chunk.decay,
                        constants,
                    );
                }
            }
            let grads = cpu(&grads, &[size]);
            sgd(
                &UpdateTensors {
                    gradient_scale: Some(&scale),
                    ..UpdateTensors::new([&values, &grads], &chunks, &scalars)
                },
                momentum,
                &constants,
            )
            .unwrap();
        }
        // |p| < 32 and |buffer| < 32. A step rounds the buffer by 3 × 32ε, which stays in it for 10
        // steps and reaches the value times lr = 0.1, twice with Nesterov. It rounds the value by
        // 2 × 32ε.
        assert_close(&values.to_vec::<f32>().unwrap(), &p, |_, _| {
            20.0 * 8.0 * 32.0 / f64::from(1 << 24)
        });
    }
}

/// PyTorch 2.11, with `momentum` and `nesterov` as in KINDS:
/// ```python
/// p = torch.tensor([.5, -1.25, 2., 0.], requires_grad=True)
/// o = torch.optim.SGD([p], lr=.1, weight_decay=.05, momentum=…, nesterov=…)
/// for g in [[.1,-.2,.3,1.], [-.4,.5,0.,-1.], [2.,-3.,.25,1e-3]]:
///     p.grad = torch.tensor(g); o.step()
/// ```
#[test]
fn pytorch_makes_the_same_three_steps() {
    let golden = [
        [
            0.322_437_167_167_663_6,
            -0.961_293_101_310_73,
            1.915_449_023_246_765_1,
            0.000_397_499_563_405_290_25,
        ],
        [
            0.334_924_727_678_298_95,
            -0.956_016_898_155_212_4,
            1.838_409_066_200_256_3,
            -0.079_702_503_979_206_09,
        ],
        [
            0.173_852_130_770_683_3,
            -0.696_971_178_054_809_6,
            1.771_073_222_160_339_4,
            -0.069_763_131_439_685_82,
        ],
    ];
    let (chunks, scalars) = (
        ChunkTable::whole(4),
        cpu(&SCALARS.to_array().unwrap(), &[2]),
    );
    for (constants, want) in KINDS.into_iter().zip(golden) {
        let (values, momentum) = (cpu(&[0.5, -1.25, 2.0, 0.0], &[4]), cpu(&[0.0; 4], &[4]));
        let momentum = (constants.momentum > 0.0).then_some(&momentum);
        for grads in [
            [0.1, -0.2, 0.3, 1.0],
            [-0.4, 0.5, 0.0, -1.0],
            [2.0, -3.0, 0.25, 1e-3],
        ] {
            sgd(
                &UpdateTensors::new([&values, &cpu(&grads, &[4])], &chunks, &scalars),
                momentum,
                &constants,
            )
            .unwrap();
        }
        // Both sides round some five times a step, numbers of up to 3.
        assert_close(&values.to_vec::<f32>().unwrap(), &want, |_, _| {
            3.0 * 5.0 * 3.0 / f64::from(1 << 24)
        });
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads_and_a_set_flag_stops_everything() {
    let _alone = crate::ops::testing::alone_with_the_pool();
    let count = 100_003;
    let run = |constants: &SgdConstants, flag: i64| -> Vec<u32> {
        let [values, grads, momentum] =
            [1, 2, 3].map(|seed| cpu(&random_f32(count, seed), &[count]));
        let buffer = (constants.momentum > 0.0).then_some(&momentum);
        let (scalars, flag) = (
            cpu(&SCALARS.to_array().unwrap(), &[2]),
            cpu_of(&[flag], &[1]),
        );
        let chunks = ChunkTable::whole(count);
        sgd(
            &UpdateTensors {
                first_bad_step: Some(&flag),
                ..UpdateTensors::new([&values, &grads], &chunks, &scalars)
            },
            buffer,
            constants,
        )
        .unwrap();
        [values, momentum]
            .iter()
            .flat_map(|x| x.to_vec::<f32>().unwrap())
            .map(f32::to_bits)
            .collect()
    };
    let untouched: Vec<u32> = [1, 3]
        .iter()
        .flat_map(|&seed| random_f32(count, seed))
        .map(f32::to_bits)
        .collect();
    for constants in &KINDS {
        threads::set_count(1).unwrap();
        let one = run(constants, 0);
        assert!(one != untouched && run(constants, 9) == untouched);
        for threads in [2, 3] {
            threads::set_count(threads).unwrap();
            assert!(run(constants, 0) == one, "{threads} threads");
        }
    }
}

#[test]
fn arguments_that_contradict_each_other_are_named() {
    let [values, grads, momentum] = [(); 3].map(|()| cpu(&[0.0; 3], &[3]));
    let (chunks, scalars) = (
        ChunkTable::whole(3),
        cpu(&SCALARS.to_array().unwrap(), &[2]),
    );
    for (buffer, factor, nesterov, wanted) in [
        (
            None,
            0.9,
            false,
            "sgd: momentum: expected 0, or a momentum buffer, got 0.9",
        ),
        (
            Some(&momentum),
            0.0,
            false,
            "sgd: momentum: expected above 0, since a momentum buffer is given, got 0",
        ),
        (
            None,
            0.0,
            true,
            "sgd: momentum: expected above 0, as nesterov requires, got 0",
        ),
        (
            None,
            f64::NAN,
            false,
            "sgd: momentum: expected 0 or more, got NaN",
        ),
    ] {
        let constants = SgdConstants {
            momentum: factor,
            nesterov,
        };
        let error = sgd(
            &UpdateTensors::new([&values, &grads], &chunks, &scalars),
            buffer,
            &constants,
        )
        .unwrap_err()
        .to_string();
        assert!(error.contains(wanted), "{error}");
    }
}
