//! Adapters beside a frozen model (`--lora`): they are trained, saved and exported as PEFT's, on
//! any ranks.

mod refused;

use std::fs;

use serde_json::{Value, json};

use super::hugging_face::{Tensors, read_tensors, write, write_tensors};
use super::losing::lost;
use crate::support::job::{Ended, Folder, all_at_once};
use crate::support::metrics_log::model_bytes;

/// The layers of a block that have adapters, with their outputs and inputs.
const LAYERS: [(&str, [usize; 2]); 7] = [
    ("self_attn.q_proj", [24, 24]),
    ("self_attn.k_proj", [8, 24]),
    ("self_attn.v_proj", [8, 24]),
    ("self_attn.o_proj", [24, 24]),
    ("mlp.gate_proj", [40, 24]),
    ("mlp.up_proj", [40, 24]),
    ("mlp.down_proj", [24, 40]),
];
const RANK: usize = 4;
/// Of two blocks: inputs and outputs of each layer.
const ADAPTER_PARAMETERS: usize = 2 * RANK * (2 * 48 + 2 * 32 + 3 * 64);

/// As `by_formula` of tests/peers/lora.py.
fn formula(number: usize) -> f32 {
    ((((number * 37 + 11) % 101) as f64 - 50.0) / 250.0) as f32
}

/// Fills tensors of these shapes, in the order of their names.
fn filled(
    shapes: impl Iterator<Item = (String, Vec<usize>)>,
    is_filled: fn(&str) -> bool,
) -> Tensors {
    let mut tensors: Tensors = shapes
        .map(|(name, shape)| (name, (shape, Vec::new())))
        .collect();
    let mut next = 0;
    for (name, (shape, values)) in &mut tensors {
        let count: usize = shape.iter().product();
        if !is_filled(name) {
            values.resize(count, 0.0);
            continue;
        }
        let one = if name.contains("norm") { 1.0 } else { 0.0 };
        values.extend((next..next + count).map(|number| formula(number) + one));
        next += count;
    }
    tensors
}

fn base() -> Tensors {
    let block = |block: usize| {
        let norms = ["input_layernorm", "post_attention_layernorm"];
        let norms = norms.map(|name| (name, vec![24]));
        let all = LAYERS
            .map(|(name, shape)| (name, shape.to_vec()))
            .into_iter()
            .chain(norms);
        all.map(move |(name, shape)| (format!("model.layers.{block}.{name}.weight"), shape))
    };
    let rest = [
        ("model.embed_tokens.weight", vec![61, 24]),
        ("model.norm.weight", vec![24]),
        ("lm_head.weight", vec![61, 24]),
    ];
    let rest = rest.map(|(name, shape)| (name.to_string(), shape));
    filled((0..2).flat_map(block).chain(rest), |_| true)
}

/// An adapter as PEFT begins one: the B's are 0.
fn adapter() -> Tensors {
    let of = |block: usize| {
        LAYERS
            .into_iter()
            .flat_map(move |(name, [outputs, inputs])| {
                let name = format!("base_model.model.model.layers.{block}.{name}");
                [("A", [RANK, inputs]), ("B", [outputs, RANK])]
                    .map(|(which, shape)| (format!("{name}.lora_{which}.weight"), shape.to_vec()))
            })
    };
    filled((0..2).flat_map(of), |name| name.contains(".lora_A."))
}

/// A folder with tokens, the model "base", and the adapter "adapter".
fn begun(name: &str) -> Folder {
    let folder = Folder::new(name);
    let tokens = (0..24 * 16 + 1u64).map(|number| ((number * number * 7 + 3) % 61) as u16);
    let bytes: Vec<u8> = tokens.flat_map(u16::to_le_bytes).collect();
    fs::write(folder.path().join("t.bin"), bytes).unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 16, "vocab_size": 61
    });
    write(&folder, "base", &config, &base());
    let path = folder.path().join("adapter");
    fs::create_dir(&path).unwrap();
    let config = json!({
        "peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": "all-linear", "bias": "none",
        "init_lora_weights": true, "rank_pattern": {}, "lora_dropout": 0.0, "modules_to_save": null
    });
    fs::write(path.join("adapter_config.json"), config.to_string()).unwrap();
    write_tensors(&path.join("adapter_model.safetensors"), &adapter());
    folder
}

const DATA: &str = "--data tokens:t.bin,vocabulary=61";
const RUN: &str = "--data tokens:t.bin,vocabulary=61 --init-from base --batch-size 24 --device cpu \
                   --threads 1 --schedule constant --warmup-steps 0 --lr 0.005 --weight-decay 0.1 \
                   --log-every 1";
/// All that PEFT's dropout, several shards and bf16 could spoil.
const HARD: &str = "--lora rank=4,alpha=8,dropout=0.3 --same-bits 4 --dtype bf16";

#[test]
fn twenty_steps_have_the_losses_of_peft() {
    let golden: Value =
        serde_json::from_str(include_str!("../../../tests/golden/lora.json")).unwrap();
    let golden: Vec<f64> = golden["losses"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| it.as_f64().unwrap())
        .collect();
    let ways = [
        (1, ""),
        (3, "--zero 1"),
        (3, "--recompute block"),
        (2, "--same-bits 3"),
    ];
    all_at_once(ways, |(ranks, words)| {
        let folder = begun("lora-losses");
        let words = format!("{RUN} --lora from=adapter --steps 20 --out OUT {words}");
        folder.started(ranks, &words).run().assert_well();
        let losses = folder.metrics_log().losses();
        assert_eq!(losses.len(), golden.len());
        for (loss, golden) in losses.iter().zip(&golden) {
            // Sums in other orders; six decimals are kept.
            assert!((loss - golden).abs() < 1e-5, "{words}: {losses:?}");
        }
    });
}

#[test]
fn adapters_alone_are_saved_and_resumed_to_the_bit_beside_the_same_base() {
    let folder = begun("lora-resumed");
    let run = |words: &str| folder.alone(&format!("{RUN} {HARD} {words}")).run();
    run("--steps 6 --out whole").assert_well();
    run("--steps 3 --out out").assert_well();
    let ended = run("--steps 3 --out more --resume never");
    ended.assert_well();
    let counts = format!(
        "a model with {} parameters, of which {ADAPTER_PARAMETERS} are trained",
        2 * 61 * 24 + 5 * 24 + 2 * 4416 + ADAPTER_PARAMETERS
    );
    assert!(ended.stderr.contains(&counts), "{ended}");
    run("--steps 6 --out out --resume auto").assert_well();
    let bytes = model_bytes(&folder.out(), 6);
    assert!(bytes == model_bytes(&folder.path().join("whole"), 6));
    let saved = read_tensors(&folder.checkpoint(6).join("model.safetensors"));
    let count: usize = saved.values().map(|(_, values)| values.len()).sum();
    assert_eq!(count, ADAPTER_PARAMETERS);

    let evaluate = || {
        folder
            .alone(&format!("eval --checkpoint out {DATA} --device cpu"))
            .run()
    };
    evaluate().assert_well();
    let mut other = base();
    other.get_mut("model.norm.weight").unwrap().1[5] += 1e-3;
    write_tensors(&folder.path().join("base/model.safetensors"), &other);
    for ended in [evaluate(), run("--steps 7 --out out --resume auto")] {
        let text = ended.assert_fails(65);
        assert!(
            text.contains("base: expected the base model that the adapters"),
            "{ended}"
        );
    }
    // A base that was moved is given anew.
    write_tensors(&folder.path().join("base/model.safetensors"), &base());
    let before = evaluate();
    before.assert_well();
    fs::rename(folder.path().join("base"), folder.path().join("moved")).unwrap();
    let ended = evaluate();
    let text = ended.assert_fails(74);
    assert!(
        text.contains("/base") && text.contains("give --init-from FOLDER"),
        "{ended}"
    );
    let moved = "--init-from moved";
    let after = folder
        .alone(&format!(
            "eval --checkpoint out {DATA} --device cpu {moved}"
        ))
        .run();
    assert_eq!(after.stdout, before.stdout);
    let resume = format!("{RUN} {HARD} --steps 7 --out out --resume auto");
    folder
        .alone(&resume.replace("--init-from base", moved))
        .run()
        .assert_well();
    for words in [
        "generate --checkpoint whole --prompt 0 --tokenizer bytes --max-tokens 1",
        "export --format hf --checkpoint whole --merge merged",
    ] {
        folder
            .alone(&format!("{words} {moved}"))
            .run()
            .assert_well();
    }
}

/// PEFT's `layers_to_transform`: the tensors say which layers are adapted.
#[test]
fn adapters_of_some_layers_are_read() {
    let folder = begun("lora-some");
    let path = folder.path().join("adapter");
    let config = path.join("adapter_config.json");
    let mut json: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    json["layers_to_transform"] = json!([1]);
    json["target_modules"] = json!([
        "q_proj",
        "v_proj",
        "k_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj"
    ]);
    fs::write(&config, json.to_string()).unwrap();
    let mut tensors = adapter();
    tensors.retain(|name, _| name.contains("layers.1."));
    write_tensors(&path.join("adapter_model.safetensors"), &tensors);
    folder
        .alone(&format!("{RUN} --lora from=adapter --steps 0 --out OUT"))
        .run()
        .assert_well();
    let saved = read_tensors(&folder.checkpoint(0).join("model.safetensors"));
    let count: usize = saved.values().map(|(_, values)| values.len()).sum();
    assert_eq!(count, ADAPTER_PARAMETERS / 2);
    // With tensors of a layer that it leaves out it would be another model than in PEFT.
    for (key, value) in [
        ("layers_to_transform", json!(0)),
        ("exclude_modules", json!(["k_proj"])),
    ] {
        let mut other = json.clone();
        other[key] = value;
        fs::write(&config, other.to_string()).unwrap();
        let words = format!("{RUN} --lora from=adapter --steps 0 --out other");
        let ended = folder.alone(&words).run();
        let cause = ended.assert_fails(65);
        assert!(
            cause.contains(key) && cause.contains(", which has tensors"),
            "{cause}"
        );
    }
    // What a checkpoint has is not read from the folder again.
    fs::write(&config, json.to_string()).unwrap();
    let words = format!("{RUN} --lora from=adapter --steps 2 --out going");
    folder.alone(&words).run().assert_well();
    fs::remove_dir_all(&path).unwrap();
    folder.alone("resume going --steps 4").run().assert_well();
}

#[test]
fn any_ranks_train_the_same_adapters_and_one_can_be_lost() {
    let words = format!("{RUN} {HARD} --steps 6 --out OUT");
    let undisturbed = {
        let folder = begun("lora-undisturbed");
        folder.alone(&words).run().assert_well();
        (folder.metrics_log().losses(), model_bytes(&folder.out(), 6))
    };
    let ways = [
        (3, "--zero 1 --recompute block", ""),
        (2, "--zero 2 --bucket-mb 0.01", ""),
        (3, "--min-ranks 2", "1:forward:3:kill"),
        (3, "--min-ranks 2 --zero 1", "0:optimizer:3:kill"),
    ];
    let check = |folder: &Folder, ended: Ended, losses: usize| {
        assert_eq!(ended.exit_code(), Some(0), "{ended}");
        let log = folder.metrics_log();
        assert_eq!(lost(&log).len(), losses, "{ended}");
        assert!(log.losses() == undisturbed.0, "{ended}");
        assert!(model_bytes(&folder.out(), 6) == undisturbed.1, "{ended}");
    };
    all_at_once(ways, |(ranks, more, fault)| {
        let folder = begun("lora-ranks");
        let job = folder.started(ranks, &format!("{words} {more}"));
        let ended = job.env("DDP_TEST_FAULT", fault).run();
        check(&folder, ended, usize::from(!fault.is_empty()));
    });
    // The new process of a rank reads the base itself.
    let folder = begun("lora-restarted");
    let words = format!("{words} --min-ranks 3 --restarts 1 --zero 1");
    let job = folder.started(3, &words);
    let running = job.env("DDP_TEST_FAULT", "2:forward:3:hold").start();
    running.wait_for_fault("2:forward:3");
    running.signal_rank(1, "KILL");
    running.go_on(3);
    check(&folder, running.wait(), 1);
}

/// A run whose adapters cover some rows of packed layers, in transformers' names.
#[test]
fn an_export_has_the_keys_of_peft_and_merges_to_the_same_model() {
    let folder = begun("lora-exported");
    let run = |words: &str| {
        let ended = folder.alone(words).run();
        ended.assert_well();
        ended
    };
    let lora = "rank=3,alpha=6,on=q_proj,v_proj,blocks.0.mlp.up,rslora=true";
    run(&format!("{RUN} --lora {lora} --steps 3 --out OUT"));
    run("export --format hf --checkpoint out adapted");
    run("export --format hf --checkpoint out --merge merged");
    let path = |name: &str| folder.path().join(name);
    let config = fs::read_to_string(path("adapted/adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    // up_proj of block 1 has no adapter, so ends of names do not suffice.
    let layers = [
        "0.self_attn.q_proj",
        "0.self_attn.v_proj",
        "0.mlp.gate_proj",
        "0.mlp.up_proj",
        "1.self_attn.q_proj",
        "1.self_attn.v_proj",
    ]
    .map(|name| format!("model.layers.{name}"));
    assert_eq!(config["target_modules"], json!(layers));
    assert_eq!(
        [&config["r"], &config["use_rslora"]],
        [&json!(3), &json!(true)]
    );
    assert_eq!(config["base_model_name_or_path"], json!(path("base")));
    let adapters = read_tensors(&path("adapted/adapter_model.safetensors"));
    assert_eq!(adapters.len(), 2 * layers.len());

    let (base, merged) = (base(), read_tensors(&path("merged/model.safetensors")));
    let mut changed = 0;
    for (name, (shape, values)) in &merged {
        let layer = name.strip_suffix(".weight").unwrap();
        let part = |which| adapters.get(&format!("base_model.model.{layer}.lora_{which}.weight"));
        let mut expected = base[name].1.clone();
        if let Some(((a_shape, a), (b_shape, b))) = part("A").zip(part("B")) {
            changed += 1;
            let [rows, columns] = shape[..] else {
                panic!("{name}")
            };
            assert_eq!([a_shape, b_shape], [&[3, columns], &[rows, 3]], "{name}");
            assert!(b.iter().any(|value| *value != 0.0), "{name}");
            for (place, value) in expected.iter_mut().enumerate() {
                let product = |k: usize| {
                    f64::from(b[place / columns * 3 + k])
                        * f64::from(a[k * columns + place % columns])
                };
                *value += (6.0 / 3f64.sqrt() * (0..3).map(product).sum::<f64>()) as f32;
            }
        }
        for (value, expected) in values.iter().zip(&expected) {
            assert!(
                (value - expected).abs() < 1e-6,
                "{name}: {value} {expected}"
            );
        }
    }
    assert_eq!(changed, layers.len());

    // Read again they are the same, here and in generate.
    run(&format!(
        "{RUN} --lora from=adapted,rank=3,alpha=6,on={},rslora=true --steps 0 --out again",
        layers.join(",")
    ));
    assert!(model_bytes(&path("again"), 0) == model_bytes(&folder.out(), 3));
    let texts = ["out", "adapted", "merged"].map(|model| {
        run(&format!("generate --checkpoint {model} --prompt 0 --tokenizer bytes --temperature 0 --max-tokens 8")).stdout
    });
    assert!(texts[0] == texts[1] && texts[1] == texts[2], "{texts:?}");
    // An adapter is evaluated and merged as the run that it came from.
    let evaluate = |of: &str| {
        run(&format!(
            "eval --checkpoint {of} {DATA} --device cpu --json"
        ))
    };
    let losses = ["out", "adapted"].map(|of| {
        let json: Value = serde_json::from_str(&evaluate(of).stdout).unwrap();
        json["loss"].as_f64().unwrap()
    });
    assert!(losses[0] == losses[1], "{losses:?}");
    run("export --format hf --checkpoint adapted --merge again-merged");
    let read = |name: &str| read_tensors(&path(name).join("model.safetensors"));
    assert!(read("again-merged") == read("merged"));
    let ended = folder
        .alone("export --format hf --checkpoint merged --merge x")
        .run();
    ended.assert_fails(2);
}

/// Llama 3 8B: its weights in bf16, and f32 of its adapters. No such model is made.
#[test]
fn a_dry_run_tells_what_a_large_model_takes() {
    let folder = begun("lora-memory");
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 16, "vocab_size": 128256
    });
    let path = folder.path().join("large");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("config.json"), config.to_string()).unwrap();
    let words = "--lora rank=16 --dtype bf16 --init-from large --dry-run --out OUT";
    let ended = folder
        .alone(
            &format!("{RUN} {words}")
                .replace("vocabulary=61", "vocabulary=128256")
                .replace("--init-from base", ""),
        )
        .run();
    ended.assert_well();
    let adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336));
    let mb = |bytes: usize| format!("{:.1} MB", bytes as f64 / 1e6);
    let expected = format!("frozen weights 16.06 GB, gradients {}", mb(4 * adapters));
    assert!(ended.stdout.contains(&expected), "{expected}: {ended}");
}
