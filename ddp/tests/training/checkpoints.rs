//! Checkpoints restore what was saved, to the bit: on any number of ranks, with or without ZeRO-1.
//! Ranks are threads of this process. Split models are in claims/split.rs; damaged checkpoints and
//! full disks in src/checkpoint/tests.

mod chosen;
mod rank_counts;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::support::random::uniform;
use crate::support::training::{Case, on_ranks, quietly, try_on_ranks};
use ddp::Result;
use ddp::checkpoint::{self, Best, Opened, Saver, State};
use ddp::config::Config;
use ddp::data::TaskSpec;
use ddp::nn::{Activate, Dropout, Linear, Sequential};
use ddp::optim::{Method, Rule};
use ddp::step::Step;
use ddp_comm::World;
use ddp_kernels::ops::SgdConstants;

/// Removed with everything in it when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "ddp-checkpoints-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A layer of several quanta, and small ones, in buckets that cut them.
fn case(rule: Rule) -> Case {
    Case {
        hidden: vec![70, 70, 9],
        rule,
        learning_rate: 1e-2,
        bucket_elements: 3000,
        batch: 11,
        ..Case::regression(40, uniform)
    }
}

fn sgd(momentum: f64) -> Rule {
    Rule {
        weight_decay: 0.0,
        ..Rule::of(Method::Sgd(SgdConstants {
            momentum,
            nesterov: false,
        }))
    }
}

/// What a run of these tests is after `step` steps.
fn state(world: &World, step: u64) -> State {
    crate::support::training::state(world.size(), &case(sgd(0.0)).data, step)
}

/// Takes these steps, counted from 0.
fn train(case: &Case, world: &World, step: &mut Step, steps: std::ops::Range<u64>) -> Result<()> {
    let mut loader = case.loader(world)?;
    for step0 in steps {
        step.run(loader.load(step0)?, case.learning_rate)?;
    }
    Ok(())
}

/// Bits of values by name, and of what this rank has of the moments by name and place.
type Bits = (
    BTreeMap<String, Vec<u32>>,
    BTreeMap<(String, usize), Vec<u32>>,
);

fn bits(step: &mut Step) -> Result<Bits> {
    step.gather()?;
    let (mut values, mut moments) = (BTreeMap::new(), BTreeMap::new());
    let of = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    for stage in step.stages() {
        let params = &stage.model().params;
        for parameter in params.list() {
            values.insert(
                parameter.name.clone(),
                of(params.master(parameter.id).to_vec()?),
            );
        }
        for (name, moment) in stage.optimizer().moments() {
            let all = of(moment.to_vec()?);
            let pieces = stage.optimizer().owned_pieces().iter();
            for piece in pieces.filter(|piece| piece.moments.contains(&name)) {
                let name = format!("{}.{name}", params.parameter(piece.parameter).name);
                moments.insert(
                    (name, piece.start),
                    all[piece.at..piece.at + piece.length].to_vec(),
                );
            }
        }
    }
    Ok((values, moments))
}

/// The values, which all ranks have, and the moments of all ranks together.
fn together(ranks: Vec<Bits>) -> (BTreeMap<String, Vec<u32>>, BTreeMap<String, Vec<u32>>) {
    let values = ranks[0].0.clone();
    assert!(
        ranks.iter().all(|rank| rank.0 == values),
        "ranks have different values"
    );
    let mut pieces: BTreeMap<(String, usize), Vec<u32>> = BTreeMap::new();
    ranks
        .into_iter()
        .for_each(|(_, moments)| pieces.extend(moments));
    let mut moments: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for ((name, start), piece) in pieces {
        let whole = moments.entry(name).or_default();
        assert_eq!(whole.len(), start, "pieces that do not meet");
        whole.extend(piece);
    }
    (values, moments)
}

/// Trains for this many steps, saves, and takes three more during the write. Returns the state at
/// the time of saving.
fn save(case: &Case, ranks: usize, steps: u64, out: &Path) -> Vec<Bits> {
    on_ranks(ranks, Some(1), |world| {
        let mut step = case.step(world)?;
        let mut saver = Saver::new(world, out, 3)?;
        train(case, world, &mut step, 0..steps)?;
        saver.save(&mut step, state(world, steps))?;
        let saved = bits(&mut step)?;
        train(case, world, &mut step, steps..steps + 3)?;
        let folder = saver.finish()?;
        assert_eq!(folder, Some(checkpoint::folder(out, steps)));
        assert_eq!(saver.written(), [(steps, checkpoint::folder(out, steps))]);
        assert_eq!(saver.written(), []);
        assert!(
            steps == 0 || bits(&mut step)? != saved,
            "nothing was trained"
        );
        Ok(saved)
    })
}

fn opened(out: &Path) -> Opened {
    let (newest, passed_over) = checkpoint::newest(out).unwrap();
    assert_eq!(passed_over, []);
    newest.unwrap()
}

fn restored(case: &Case, ranks: usize, out: &Path) -> Vec<Bits> {
    let opened = opened(out);
    on_ranks(ranks, Some(2), |world| {
        let mut step = case.step(world)?;
        checkpoint::restore(&opened, &mut step)?;
        bits(&mut step)
    })
}

/// Ranks, and whether they share the moments.
const WORLDS: [(usize, bool); 6] = [
    (1, false),
    (2, false),
    (1, true),
    (2, true),
    (3, true),
    (4, true),
];

#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    quietly();
    let (adamw, muon) = (Rule::adamw(), Rule::muon());
    for (ranks, zero, rule) in [
        (1, false, adamw),
        (2, false, muon),
        (3, true, adamw),
        (3, true, muon),
    ] {
        let case = Case {
            zero,
            dropout: 0.2,
            clip_norm: 0.5,
            ..case(rule)
        };
        let folder = Folder::new();
        save(&case, ranks, 5, &folder.0);
        let opened = opened(&folder.0);
        let ends = |goes_on: bool| {
            on_ranks(ranks, Some(3), |world| {
                let mut step = case.step(world)?;
                let first = if goes_on { 5 } else { 0 };
                if goes_on {
                    checkpoint::restore(&opened, &mut step)?;
                }
                train(&case, world, &mut step, first..12)?;
                bits(&mut step)
            })
        };
        assert!(ends(true) == ends(false), "{ranks} ranks, ZeRO {zero}");
    }
}

/// As versions up to 0.6 saved a perceptron with dropout, and as `torch.nn.Sequential` names one.
#[test]
fn a_perceptron_whose_dropout_layers_have_numbers_is_restored() {
    quietly();
    let numbered = |case: &Case| {
        let mut layers = Sequential::new();
        for &width in &case.hidden {
            layers = layers.then(Linear::new(width));
            layers = layers.then(Activate::new(case.activation.unwrap()));
            layers = layers.then(Dropout::new(case.dropout));
        }
        layers.then(Linear::new(4))
    };
    for (saved_by, restored_by) in [((1, false), (2, false)), ((3, true), (1, false))] {
        let case = |zero| Case {
            dropout: 0.2,
            zero,
            ..case(Rule::adamw())
        };
        let folder = Folder::new();
        let (ranks, zero) = saved_by;
        let before = on_ranks(ranks, Some(3), |world| {
            let case = case(zero);
            let mut step = case.step_of(world, numbered(&case))?;
            train(&case, world, &mut step, 0..5)?;
            let mut saver = Saver::new(world, &folder.0, 3)?;
            saver.save(&mut step, state(world, 5))?;
            saver.finish()?;
            bits(&mut step)
        });
        let (ranks, zero) = restored_by;
        let after = on_ranks(ranks, Some(3), |world| {
            let mut step = case(zero).step(world)?;
            checkpoint::restore(&opened(&folder.0), &mut step)?;
            bits(&mut step)
        });
        let renamed = |bits: BTreeMap<String, Vec<u32>>| -> BTreeMap<String, Vec<u32>> {
            let name = |name: String| {
                let (layer, rest) = name.split_once('.').unwrap();
                format!("{}.{rest}", layer.parse::<usize>().unwrap() / 3 * 2)
            };
            bits.into_iter()
                .map(|(of, bits)| (name(of), bits))
                .collect()
        };
        let (values, moments) = together(before);
        assert!((renamed(values), renamed(moments)) == together(after));
    }
}

#[test]
fn the_models_file_has_the_same_bytes_whoever_writes_it() {
    quietly();
    let case = case(Rule::adamw());
    let first = Folder::new();
    save(&case, 1, 5, &first.0);
    let opened = opened(&first.0);
    let bytes = fs::read(opened.model_file()).unwrap();
    for (ranks, zero) in WORLDS {
        let (folder, case) = (
            Folder::new(),
            Case {
                zero,
                ..case.clone()
            },
        );
        on_ranks(ranks, Some(1), |world| {
            let mut step = case.step(world)?;
            checkpoint::restore(&opened, &mut step)?;
            let mut saver = Saver::new(world, &folder.0, 3)?;
            saver.save(&mut step, state(world, 5))?;
            saver.finish()
        });
        assert!(
            fs::read(checkpoint::folder(&folder.0, 5).join("model.safetensors")).unwrap() == bytes,
            "{ranks}, {zero}"
        );
    }
}

#[test]
fn the_state_comes_back_to_the_bit() {
    quietly();
    let folder = Folder::new();
    let told = State {
        best: Some(Best {
            step: 2,
            loss: 0.1 + 0.7,
            accuracy: Some(1.0 / 3.0),
            by: None,
        }),
        last: Some(Best {
            step: 2,
            loss: 5e-324,
            ..Best::default()
        }),
        task: TaskSpec::named_classes(vec!["cat".into(), "né \"x\"".into()]),
        normalization: Some(ddp::data::Normalization::new(vec![0.1; 6], vec![1e-30; 6])),
        columns: Some(["a", "b", "c", "d", "e", "f"].map(String::from).into()),
        config: Config {
            lr: Some(0.1 + 0.2),
            seed: 1 << 62,
            ..Config::default()
        }
        .to_json(),
        ..state(&World::single().unwrap(), 3)
    };
    on_ranks(1, None, |world| {
        let mut step = case(sgd(0.0)).step(world)?;
        let mut saver = Saver::new(world, &folder.0, 3)?;
        saver.save(&mut step, told.clone())?;
        saver.finish()
    });
    assert_eq!(opened(&folder.0).state, told);
}

#[test]
fn moments_of_another_optimizer_or_model_are_refused_and_nothing_changes() {
    quietly();
    let folder = Folder::new();
    save(&case(Rule::adamw()), 1, 2, &folder.0);
    let opened = opened(&folder.0);
    let shorter = Case {
        hidden: vec![70],
        ..case(Rule::adamw())
    };
    let frozen = Case {
        frozen: "0.",
        ..case(Rule::adamw())
    };
    for (case, parts) in [
        (
            case(sgd(0.9)),
            &[
                "lacks",
                ".momentum_buffer",
                "it has 0.bias.exp_avg,",
                "`optimizer`, `momentum` and `freeze`",
            ][..],
        ),
        (
            case(sgd(0.0)),
            &["it has 0.bias.exp_avg,", "which this run does not"],
        ),
        (
            frozen,
            &[
                "it has 0.bias.exp_avg, 0.bias.exp_avg_sq, 0.weight.exp_avg, 0.weight.exp_avg_sq, which",
            ],
        ),
        (
            shorter,
            &["cannot load the model", "of another model: it has 4."],
        ),
    ] {
        let world = World::single().unwrap();
        let mut step = case.step(&world).unwrap();
        let before = bits(&mut step).unwrap();
        let error = checkpoint::restore(&opened, &mut step).unwrap_err();
        assert_eq!(error.exit_code(), 65);
        parts
            .iter()
            .for_each(|part| assert!(error.to_string().contains(part), "{error} lacks {part}"));
        assert!(bits(&mut step).unwrap() == before);
    }
}

#[test]
fn values_alone_are_restored_for_a_fresh_optimizer() {
    quietly();
    let folder = Folder::new();
    let saved = together(save(&case(Rule::adamw()), 2, 2, &folder.0));
    let world = World::single().unwrap();
    let mut step = case(sgd(0.9)).step(&world).unwrap();
    checkpoint::restore_values(&opened(&folder.0), &mut step).unwrap();
    let (values, moments) = together(vec![bits(&mut step).unwrap()]);
    assert_eq!(values, saved.0);
    assert!(moments.values().flatten().all(|&bits| bits == 0));
}

#[test]
fn moments_have_names_that_other_programs_can_read() {
    quietly();
    let folder = Folder::new();
    save(
        &Case {
            zero: true,
            ..case(Rule::adamw())
        },
        2,
        2,
        &folder.0,
    );
    let mut seen = BTreeMap::new();
    for part in 0..2 {
        let name = format!("optimizer-{part:05}-of-00002.safetensors");
        let bytes = fs::read(checkpoint::folder(&folder.0, 2).join(name)).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let pieces: serde_json::Value =
            serde_json::from_str(&header.metadata().as_ref().unwrap()["pieces"]).unwrap();
        for piece in pieces.as_array().unwrap() {
            let tensor = file.tensor(piece["tensor"].as_str().unwrap()).unwrap();
            assert_eq!(tensor.shape(), [piece["length"].as_u64().unwrap() as usize]);
            let name = format!(
                "{}.{}",
                piece["parameter"].as_str().unwrap(),
                piece["moment"].as_str().unwrap()
            );
            *seen.entry(name).or_insert(0) += piece["length"].as_u64().unwrap();
        }
    }
    // The largest layer is shared by both.
    assert_eq!(
        (seen["2.weight.exp_avg"], seen["2.weight.exp_avg_sq"]),
        (70 * 70, 70 * 70),
        "{seen:?}"
    );
}
