//! Training in bf16 and TF32: equal to the CPU's f32 where numbers are exact; and what must be f32
//! is f32.

use ddp::checkpoint::{self, Saver};
use ddp::config::{GraphChoice, Precision};
use ddp::models::{Mlp, Model};
use ddp::nn::Mse;
use ddp::optim::{Method, Optimizer, Rule};
use ddp::params::Params;
use ddp::step::{StageSpec, Step, StepOptions};
use ddp_comm::{Group, World};
use ddp_kernels::ops::{Activation, SgdConstants};
use ddp_kernels::{DType, Device, Tensor, memory};

use crate::support::random::{mixed, uniform};
use crate::support::training::{Case, on_ranks};
use crate::{Setup, Training, captured, gpu, ways};

/// In bf16 on GPUs.
fn bf16(setup: Setup) -> Setup {
    Setup {
        precision: Precision::Bf16,
        ..setup
    }
}

fn numbers() -> Setup {
    Setup::new("synthetic:regression,rows=100,held-out=0,features=8,outputs=2")
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let wide = tensor
        .to(Device::Cpu)
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap();
    wide.to_vec::<f32>()
        .unwrap()
        .iter()
        .map(|value| value.to_bits())
        .collect()
}

/// What layers read is the masters, each rounded once to bf16.
#[track_caller]
fn check_copies(params: &Params) {
    assert_eq!(
        (params.dtype(), params.master_dtype()),
        (DType::BF16, DType::F32)
    );
    crate::support::training::check_copies(params).unwrap();
}

#[test]
fn tf32_is_not_f32_by_another_name_and_has_the_same_bits_captured_and_eager() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let tf32 = |setup| Setup {
        precision: Precision::Tf32,
        ..setup
    };
    // Forward (the losses) and backward have other bits.
    let first = |setup: &Setup| {
        let mut training = setup.start(device, GraphChoice::Off).unwrap();
        training.take(0, 0.01, false).unwrap();
        (
            training.step.report().unwrap().stats.loss(),
            training.bits().unwrap(),
        )
    };
    let (strict, cut) = (first(&numbers()), first(&tf32(numbers())));
    assert!(strict.0 != cut.0 && strict.1 != cut.1);
    let captured = |setup: &Setup, graph| captured::run(setup, device, graph, false).0;
    let short = tf32(Setup::new("glyphs,rows=50,held-out=0"));
    assert!(captured(&short, GraphChoice::On) == captured(&short, GraphChoice::Off));
}

/// Multiples of 2⁻¹⁰ from -1 to 1: 11 bits, of which TF32 cuts nothing.
fn eleven_bits(stream: u64, index: u64) -> f32 {
    (mixed(stream, index) % 2048) as f32 / 1024.0 - 1.0
}

#[test]
fn tf32_is_in_force_in_backward_as_in_forward() {
    let Some(gpu) = gpu() else { return };
    // A linear layer's forward factors have 11 bits; its output has more, and so have backward's
    // factors.
    let case = Case {
        hidden: vec![],
        device: gpu.device,
        ..Case::regression(48, eleven_bits)
    };
    let take = |precision| {
        on_ranks(1, None, |world| {
            Case {
                precision,
                ..case.clone()
            }
            .run(world)
        })
        .remove(0)
    };
    let (strict, cut) = (take(Precision::F32), take(Precision::Tf32));
    assert_eq!(strict.losses, cut.losses);
    assert_ne!(strict.values, cut.values);
}

/// -1 to 1, more often 1, so that sums grow.
fn small(stream: u64, index: u64) -> f32 {
    [-1.0, 0.0, 1.0, 1.0][(mixed(stream, index) % 4) as usize]
}

/// Gradients and values after a step of a rank alone.
fn after_a_step(case: &Case) -> (Vec<Vec<f32>>, Vec<u32>) {
    on_ranks(1, None, |world| {
        let mut step = case.step(world)?;
        let mut loader = case.loader(world)?;
        step.measure_norm(true);
        step.run(loader.load(0)?, case.learning_rate)?;
        let params = &step.stages()[0].model().params;
        let trained = params.in_order().into_iter().filter(|p| p.is_trained());
        let gradient =
            |p: &ddp::params::Parameter| Ok(params.gradient(p.id).expect("trained").to_vec()?);
        let gradients = trained.map(gradient).collect::<ddp::Result<Vec<_>>>()?;
        if case.device != Device::Cpu {
            check_copies(params);
        }
        Ok((gradients, crate::support::training::bits(params)?))
    })
    .remove(0)
}

/// All factors and stored numbers are whole and at most 256, which bf16 holds: six inputs and a
/// bias of at most 1 give at most 7; four of those and a bias at most 29, 30 from the target;
/// doubled 60, and four of them 240. Gradients of parameters are larger sums, in f32.
#[test]
fn where_numbers_are_exact_bf16_has_the_bits_of_the_cpus_f32_and_sums_of_more_bits_than_it_holds() {
    let Some(gpu) = gpu() else { return };
    let plain = Case {
        hidden: vec![4],
        batch: 96,
        precision: Precision::Bf16,
        ..Case::regression(96, small)
    };
    let momentum = Rule {
        weight_decay: 0.25,
        ..Rule::of(Method::Sgd(SgdConstants {
            momentum: 0.5,
            nesterov: true,
        }))
    };
    let cases = [
        plain.clone(),
        // Accumulated over twenty micro-batches.
        Case {
            micro: Some(5),
            ..plain.clone()
        },
        Case {
            activation: None,
            ..plain.clone()
        },
        Case {
            rule: Rule::adamw(),
            clip_norm: 0.5,
            ..plain.clone()
        },
        Case {
            rule: momentum,
            frozen: "2.",
            ..plain.clone()
        },
    ];
    for (index, case) in cases.into_iter().enumerate() {
        let on = |device| {
            after_a_step(&Case {
                device,
                ..case.clone()
            })
        };
        let ((gradients, values), expected) = (on(gpu.device), on(Device::Cpu));
        assert!(
            gradients == expected.0 && values == expected.1,
            "case {index}"
        );
        let rounded = |value: f32| ddp_kernels::dtype::bf16::from_f32(value).to_f32();
        let wide = gradients
            .iter()
            .flatten()
            .filter(|&&gradient| rounded(gradient) != gradient)
            .count();
        assert!(
            wide > 0,
            "case {index}: no gradient has more bits than bf16"
        );
    }
}

#[test]
fn after_every_step_layers_read_the_masters_rounded_once() {
    let Some(gpu) = gpu() else { return };
    for (graph, rule) in [
        (GraphChoice::Off, Rule::adamw()),
        (GraphChoice::On, Rule::sgd(0.9)),
        (GraphChoice::On, Rule::muon()),
    ] {
        let setup = Setup {
            rule,
            ..bf16(Setup::new("glyphs,rows=50,held-out=0"))
        };
        let mut training = setup.start(gpu.device, graph).unwrap();
        let mut before = Vec::new();
        for step0 in 0..12 {
            training.take(step0, 0.01, false).unwrap();
            let params = &training.step.stages()[0].model().params;
            check_copies(params);
            let now = bits(params.read_arena());
            assert!(now != before, "step {step0} changed what layers read");
            before = now;
        }
    }
}

/// Of the trained numbers, how many are no longer what they were.
fn moved(training: &Training, masters: &[u32], read: &[u32]) -> [usize; 2] {
    let params = &training.step.stages()[0].model().params;
    let differ = |now: Vec<u32>, then: &[u32]| {
        now.iter()
            .zip(then)
            .filter(|(now, then)| now != then)
            .count()
    };
    [
        differ(bits(params.values()), masters),
        differ(bits(params.read_arena()), read),
    ]
}

#[test]
fn updates_too_small_for_bf16_add_up_in_the_masters() {
    let Some(gpu) = gpu() else { return };
    // 18 numbers up to 0.35, 2⁻⁹ to 2⁻¹² apart in bf16. Gradients are a few units, so an update is
    // about 1e-5: few or no rounded numbers change in one step, but all masters do.
    let setup = Setup {
        hidden: vec![],
        rule: Rule::sgd(0.0),
        ..bf16(numbers())
    };
    let mut training = setup.start(gpu.device, GraphChoice::Auto).unwrap();
    let params = &training.step.stages()[0].model().params;
    let (masters, read, count) = (
        bits(params.values()),
        bits(params.read_arena()),
        params.trained_count(),
    );
    let rate = 1e-5;
    training.take(0, rate, false).unwrap();
    let [masters_moved, read_moved] = moved(&training, &masters, &read);
    assert_eq!(masters_moved, count, "of {count}");
    assert!(
        read_moved <= count / 4,
        "{read_moved} of {count} rounded numbers changed at once"
    );
    (1..300).for_each(|step0| training.take(step0, rate, false).unwrap());
    let [_, read_moved] = moved(&training, &masters, &read);
    assert!(
        read_moved > count / 2,
        "{read_moved} of {count} rounded numbers changed in the end"
    );
}

#[test]
fn bf16_has_the_same_bits_captured_and_eager() {
    let Some(gpu) = gpu() else { return };
    let glyphs = || bf16(Setup::new("glyphs,rows=50,held-out=0"));
    let all = Setup {
        activation: Activation::Gelu,
        dropout: 0.25,
        clip_norm: 0.5,
        micro: Some(5),
        reduce_dtype: DType::BF16,
        ..glyphs()
    };
    let tanh = Setup {
        activation: Activation::GeluTanh,
        hidden: vec![16, 8],
        ..bf16(numbers())
    };
    for (index, setup) in [glyphs(), all, tanh].iter().enumerate() {
        let run = |graph| captured::run(setup, gpu.device, graph, false);
        let (eager, captured) = (run(GraphChoice::Off), run(GraphChoice::On));
        assert!(
            captured.1.is_some_and(|graphs| graphs > 0),
            "case {index} was captured"
        );
        assert!(captured.0 == eager.0, "case {index}");
    }
}

#[test]
fn a_checkpoint_holds_the_masters_and_gives_them_back() {
    let Some(gpu) = gpu() else { return };
    let setup = bf16(Setup::new("glyphs,rows=50,held-out=0"));
    let mut training = setup.start(gpu.device, GraphChoice::Auto).unwrap();
    (0..5).for_each(|step0| training.take(step0, 0.01, false).unwrap());
    let params = &training.step.stages()[0].model().params;
    let folder = std::env::temp_dir().join(format!("ddp-precision-{}", std::process::id()));
    let path = folder.join("model.safetensors");
    std::fs::create_dir_all(&folder).unwrap();
    checkpoint::write_model(&path, &[params]).unwrap();
    for (device, what) in [(gpu.device, "bf16"), (Device::Cpu, "f32")] {
        let other = setup.start(device, GraphChoice::Auto).unwrap();
        let loaded = &other.step.stages()[0].model().params;
        assert_ne!(
            crate::support::training::bits(loaded).unwrap(),
            crate::support::training::bits(params).unwrap()
        );
        checkpoint::load_model(&path, &[loaded]).unwrap();
        for p in params.list() {
            let value = loaded.master(loaded.find(&p.name).unwrap().id);
            assert!(
                bits(value) == bits(params.master(p.id)),
                "{} in {what}",
                p.name
            );
        }
        if device == gpu.device {
            check_copies(loaded);
            assert!(bits(loaded.read_arena()) == bits(params.read_arena()));
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_resumed_bf16_run_ends_with_the_same_bits() {
    let Some(gpu) = gpu() else { return };
    let setup = bf16(Setup::new("glyphs,rows=50,held-out=0"));
    let out = std::env::temp_dir().join(format!("ddp-precision-run-{}", std::process::id()));
    let world = World::single().unwrap();
    let mut saver = Saver::new(&world, &out, 3).unwrap();
    let rows = crate::support::training::Case::regression(50, crate::support::random::uniform).data;
    let mut first = setup.start(gpu.device, GraphChoice::Auto).unwrap();
    for step0 in 0..12 {
        if step0 == 5 {
            saver
                .save(
                    &mut first.step,
                    crate::support::training::state(1, &rows, 5),
                )
                .unwrap();
        }
        first.take(step0, 0.01, false).unwrap();
    }
    saver.finish().unwrap();
    let mut other = setup.start(gpu.device, GraphChoice::Auto).unwrap();
    checkpoint::restore(
        &checkpoint::newest(&out).unwrap().0.unwrap(),
        &mut other.step,
    )
    .unwrap();
    check_copies(&other.step.stages()[0].model().params);
    (5..12).for_each(|step0| other.take(step0, 0.01, false).unwrap());
    let (first, other) = (&first.step, &other.step);
    assert!(
        bits(first.stages()[0].model().params.values())
            == bits(other.stages()[0].model().params.values())
    );
    let moments = first.stages()[0]
        .optimizer()
        .moments()
        .zip(other.stages()[0].optimizer().moments());
    moments.for_each(|((name, first), (_, other))| assert!(bits(first) == bits(other), "{name}"));
    std::fs::remove_dir_all(&out).unwrap();
}

#[test]
fn bf16_takes_two_bytes_more_a_parameter_and_half_for_activations() {
    let Some(gpu) = gpu() else { return };
    let layers = || {
        Mlp {
            hidden: vec![500],
            outputs: 10,
            activation: Activation::Relu,
            dropout: 0.0,
        }
        .layers()
    };
    let model = |precision| {
        Model::new(
            Box::new(layers()),
            &[784],
            precision,
            gpu.device,
            1,
            &|_| false,
        )
        .unwrap()
    };
    let taken = |precision| {
        let before = memory::stats(gpu.device).allocated_bytes;
        let model = model(precision);
        (
            memory::stats(gpu.device).allocated_bytes - before,
            model.params,
        )
    };
    let ((wide, params), (narrow, copies)) = (taken(Precision::F32), taken(Precision::Bf16));
    let end = |params: &Params| params.values().count();
    assert_eq!(copies.read_arena().bytes(), 2 * end(&copies));
    // Values and gradients, each in whole blocks of the allocator; parameters lie slightly further
    // apart.
    let expected = 2 * end(&copies) + 8 * (end(&copies) - end(&params));
    assert!(
        (narrow - wide).abs_diff(expected) <= 3 * 4096,
        "{narrow} and {wide}, expected {expected} more"
    );
    let activations = |precision| {
        let setup = Setup {
            hidden: vec![500],
            precision,
            ..Setup::new("glyphs,rows=50,held-out=0")
        };
        let mut training = setup.start(gpu.device, GraphChoice::Off).unwrap();
        (0..3).for_each(|step0| training.take(step0, 0.01, false).unwrap());
        training.step.activation_bytes()
    };
    // In bf16 the input is kept rounded, too, 784 a row; the sums of gradients' rows stay f32.
    let (wide, narrow) = (activations(Precision::F32), activations(Precision::Bf16));
    assert!(
        narrow < wide / 2 + 16 * 784 * 2 + 500 * 2 + 1024,
        "{narrow} and {wide}"
    );
}

#[test]
fn ranks_that_share_the_optimizer_in_bf16_train_as_those_that_do_not() {
    let Some(_gpu) = gpu() else { return };
    let case = Case {
        hidden: vec![40, 9],
        rule: Rule::adamw(),
        learning_rate: 1e-2,
        bucket_elements: 3000,
        batch: 11,
        steps: 0..8,
        clip_norm: 0.5,
        precision: Precision::Bf16,
        ..Case::regression(40, uniform)
    };
    for way in ways() {
        // Sums of two have one order.
        let ranks = way.ranks_max().min(2);
        let plain = way.of(&case).train(ranks, 1);
        assert!(plain[0].losses.iter().all(|loss| loss.is_finite()));
        let zero = Case {
            zero: true,
            ..way.of(&case)
        }
        .train(ranks, 2);
        for outcomes in [&plain, &zero] {
            assert!(
                outcomes.iter().all(|outcome| *outcome == plain[0]),
                "{way:?}"
            );
        }
        // Without a look between steps: a step must gather the other ranks' parts itself.
        let unseen = |zero| {
            let case = Case {
                zero,
                ..way.of(&case)
            };
            on_ranks(ranks, None, |world| {
                let mut step = case.step(world)?;
                let mut loader = case.loader(world)?;
                case.steps
                    .clone()
                    .try_for_each(|step0| step.run(loader.load(step0)?, case.learning_rate))?;
                step.gather()?;
                check_copies(&step.stages()[0].model().params);
                crate::support::training::bits(&step.stages()[0].model().params)
            })
        };
        let (plain_bits, zero_bits) = (unseen(false), unseen(true));
        assert!(
            zero_bits
                .iter()
                .chain(&plain_bits)
                .all(|bits| *bits == plain_bits[0]),
            "{way:?}, unseen"
        );
        let narrow = Case {
            precision: Precision::F32,
            ..way.of(&case)
        }
        .train(ranks, 1);
        assert!(
            narrow[0].values != plain[0].values,
            "bf16 is not f32 by another name"
        );
    }
}

#[test]
fn a_model_in_bf16_over_two_devices_is_the_one_in_one_piece() {
    let Some(gpu) = gpu() else { return };
    let setup = Setup {
        hidden: vec![24, 12],
        rule: Rule::sgd(0.9),
        ..bf16(numbers())
    };
    let mut whole = setup.start(gpu.device, GraphChoice::Off).unwrap();
    let layers = Mlp {
        hidden: setup.hidden.clone(),
        outputs: 2,
        activation: setup.activation,
        dropout: 0.0,
    }
    .layers();
    let models = Model::split(layers, &[8], &[gpu.device; 2], |layers, shape, device| {
        Model::new(layers, shape, Precision::Bf16, device, 3, &|_| false)
    });
    let part = |model: Model| StageSpec {
        optimizer: Optimizer::new(setup.rule, &model.params).unwrap(),
        group: Group::alone(),
        model,
    };
    let parts: Vec<StageSpec> = models.unwrap().into_iter().map(part).collect();
    assert_eq!(parts.len(), 2);
    let options = StepOptions {
        graph: GraphChoice::Off,
        ..StepOptions::default()
    };
    let mut step = Step::over(parts, Box::new(Mse), &options).unwrap();
    for step0 in 0..6 {
        whole.take(step0, 0.01, true).unwrap();
        step.measure_norm(true);
        step.run(whole.loader.load(step0).unwrap(), 0.01).unwrap();
        let expected = &whole.step.stages()[0].model().params;
        for stage in step.stages() {
            let params = &stage.model().params;
            check_copies(params);
            for p in params.list() {
                let same = expected.master(expected.find(&p.name).unwrap().id);
                assert!(
                    bits(params.master(p.id)) == bits(same),
                    "{} after step {step0}",
                    p.name
                );
            }
        }
    }
}
