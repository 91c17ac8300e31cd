//! Claims about the options of a run.

use ddp_comm::World;
use ddp_nn::models::ModelSpec;
use ddp_nn::params::Precision;

use super::*;
use crate::tasks::LossOptions;

/// A run on these data, with defaults.
pub(in crate::trainer) fn options(data: &str) -> RunOptions {
    RunOptions {
        model: ModelOptions {
            spec: ModelSpec::default(),
            precision: Precision::F32,
            seed: 0,
            loss: LossOptions::default(),
        },
        freeze: vec![],
        init_from: None,
        data: RunData::Request(Box::new(DataRequest::new(data.parse().unwrap()))),
        data_on_device: Resident::Auto,
        batch_size: 128,
        micro_batch: None,
        drop_last: false,
        length: Length::Epochs(5),
        rule: Rule::adamw(),
        groups: Vec::new(),
        learning_rate: LearningRate {
            shape: Shape::Cosine,
            peak: 0.001,
            min: 0.0,
            warmup_steps: None,
        },
        grad_clip: 0.0,
        seed: 0,
        graph: GraphChoice::Auto,
        products: ProductChoice::First,
        threads: None,
        reduction: Reduction {
            bucket_bytes: None,
            dtype: DType::F32,
            overlap: Overlap::Auto,
            zero: false,
        },
        out: "out".into(),
        eval_every: None,
        sample: None,
        checkpoint_every: None,
        keep: 3,
        log_every: 10,
        trace: None,
        resume: Resume::Never,
        override_: false,
    }
}

fn changed(data: &str, change: impl FnOnce(&mut RunOptions)) -> (RunOptions, Data) {
    let mut options = options(data);
    change(&mut options);
    let data = options.data.open(&World::single().unwrap(), None).unwrap();
    (options, data)
}

#[test]
fn a_run_in_epochs_becomes_steps_once_the_data_are_known() {
    let plan = |change: fn(&mut RunOptions)| {
        let (options, data) = changed("glyphs,rows=1000", change);
        let plan = options.plan(&data).unwrap();
        (plan.steps, plan.warmup_steps, plan.eval_every)
    };
    assert_eq!(plan(|_| ()), (40, 4, 8));
    assert_eq!(
        plan(|options| options.length = Length::Steps(5000)),
        (5000, 100, 8)
    );
    assert_eq!(
        plan(|options| (options.length, options.eval_every) = (Length::Steps(0), Some(0))),
        (0, 0, 0)
    );
}

#[test]
fn options_that_do_not_fit_the_data_are_refused() {
    let (classes, numbers) = ("glyphs,rows=10", "synthetic:regression,rows=10");
    let refusal = |data: &str, change: fn(&mut RunOptions)| {
        let (options, data) = changed(data, change);
        let error = options.plan(&data).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    };
    let weights =
        |options: &mut RunOptions| options.model.loss.class_weights = vec![1.0, 2.0].into();
    for (text, part) in [
        (
            refusal(classes, weights),
            "`class-weights` 1,2: expected 10 weights",
        ),
        (
            refusal(numbers, weights),
            "`class-weights` 1,2: expected classes",
        ),
        (
            refusal(numbers, |options| options.model.loss.label_smoothing = 0.1),
            "`label-smoothing` 0.1",
        ),
        (
            refusal(classes, |options| options.drop_last = true),
            "`drop-last`",
        ),
        (
            refusal(classes, |options| {
                options.learning_rate.warmup_steps = Some(6)
            }),
            "at most the 5 steps",
        ),
        (
            refusal(classes, |options| {
                (options.length, options.batch_size) = (Length::Epochs(STEPS_MAX), 1)
            }),
            "`epochs`",
        ),
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn names_of_layers_freeze_their_parameters() {
    let (options, _) = changed("glyphs,rows=10", |options| {
        options.freeze = ["0", "2.bias", "4."].map(String::from).into();
    });
    let names = [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
        "4.weight",
        "40.weight",
        "02.bias",
    ];
    let frozen: Vec<_> = names
        .into_iter()
        .filter(|name| options.is_frozen(name))
        .collect();
    assert_eq!(frozen, ["0.weight", "0.bias", "2.bias", "4.weight"]);
    options.check_freeze(&names).unwrap();
    let text = options.check_freeze(&["0.weight", "2.bias"]).unwrap_err();
    let text = text.to_string();
    assert!(
        text.contains("`freeze` 4.:") && text.contains("0.weight, 2.bias"),
        "{text}"
    );
}
