//! Folders of Hugging Face: runs start from them, models are exported to them, and unsupported
//! settings are refused by name.

mod exported;
mod refused;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use ddp_data::safetensors::Header;
use serde_json::{Value, json};

use crate::support::job::{Ended, Folder};

/// Tensors by name: their shape and values.
pub(crate) type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// 4 windows of 3 tokens below 5.
const DATA: &str =
    "--data tokens:t.bin,vocabulary=5 --batch-size 2 --steps 0 --device cpu --threads 1";

fn gpt2_config() -> Value {
    json!({
        "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_head": 2, "n_embd": 4, "n_inner": 6, "n_positions": 3,
        "vocab_size": 5, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0
    })
}

fn llama_config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "hidden_size": 4, "intermediate_size": 6, "max_position_embeddings": 3, "vocab_size": 5
    })
}

/// Tensors of these shapes, all of whose values differ.
fn tensors(shapes: &[(&str, &[usize])]) -> Tensors {
    let mut next = 0.0;
    let mut values = |count: usize| -> Vec<f32> {
        let first = next;
        next += count as f32;
        (0..count)
            .map(|index| (first + index as f32) / 64.0)
            .collect()
    };
    let tensor = |(name, shape): &(&str, &[usize])| {
        let count = shape.iter().product();
        (name.to_string(), (shape.to_vec(), values(count)))
    };
    shapes.iter().map(tensor).collect()
}

fn gpt2_tensors() -> Tensors {
    tensors(&[
        ("transformer.wte.weight", &[5, 4]),
        ("transformer.wpe.weight", &[3, 4]),
        ("transformer.h.0.ln_1.weight", &[4]),
        ("transformer.h.0.ln_1.bias", &[4]),
        ("transformer.h.0.attn.c_attn.weight", &[4, 12]),
        ("transformer.h.0.attn.c_attn.bias", &[12]),
        ("transformer.h.0.attn.c_proj.weight", &[4, 4]),
        ("transformer.h.0.attn.c_proj.bias", &[4]),
        ("transformer.h.0.ln_2.weight", &[4]),
        ("transformer.h.0.ln_2.bias", &[4]),
        ("transformer.h.0.mlp.c_fc.weight", &[4, 6]),
        ("transformer.h.0.mlp.c_fc.bias", &[6]),
        ("transformer.h.0.mlp.c_proj.weight", &[6, 4]),
        ("transformer.h.0.mlp.c_proj.bias", &[4]),
        ("transformer.ln_f.weight", &[4]),
        ("transformer.ln_f.bias", &[4]),
    ])
}

fn llama_tensors() -> Tensors {
    tensors(&[
        ("model.embed_tokens.weight", &[5, 4]),
        ("model.layers.0.input_layernorm.weight", &[4]),
        ("model.layers.0.self_attn.q_proj.weight", &[4, 4]),
        ("model.layers.0.self_attn.k_proj.weight", &[2, 4]),
        ("model.layers.0.self_attn.v_proj.weight", &[2, 4]),
        ("model.layers.0.self_attn.o_proj.weight", &[4, 4]),
        ("model.layers.0.post_attention_layernorm.weight", &[4]),
        ("model.layers.0.mlp.gate_proj.weight", &[6, 4]),
        ("model.layers.0.mlp.up_proj.weight", &[6, 4]),
        ("model.layers.0.mlp.down_proj.weight", &[4, 6]),
        ("model.norm.weight", &[4]),
        ("lm_head.weight", &[5, 4]),
    ])
}

pub(crate) fn write_tensors(path: &Path, tensors: &Tensors) {
    let shapes = tensors
        .iter()
        .map(|(name, (shape, _))| (&name[..], &shape[..]));
    let mut bytes = Header::of(shapes).to_bytes();
    for value in tensors.values().flat_map(|(_, values)| values) {
        bytes.extend(value.to_le_bytes());
    }
    fs::write(path, bytes).unwrap();
}

pub(crate) fn read_tensors(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let header = Header::read(&mut &bytes[..], bytes.len() as u64)
        .unwrap()
        .unwrap();
    let values = |start: u64, end: u64| {
        let at = |place: u64| (header.data_start + place) as usize;
        let bytes = bytes[at(start)..at(end)].as_chunks().0;
        bytes
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect()
    };
    let entries = header.entries.iter();
    let read = entries.map(|one| {
        (
            one.name.clone(),
            (one.shape.clone(), values(one.start, one.end)),
        )
    });
    read.collect()
}

/// A Hugging Face folder called `name`, below `folder`.
pub(crate) fn write(folder: &Folder, name: &str, config: &Value, tensors: &Tensors) {
    let path = folder.path().join(name);
    fs::create_dir(&path).unwrap();
    fs::write(path.join("config.json"), config.to_string()).unwrap();
    write_tensors(&path.join("model.safetensors"), tensors);
}

/// A folder with tokens and with both models, `gpt2` and `llama`.
fn begun(name: &str) -> Folder {
    let folder = Folder::new(name);
    let tokens = (0..13u16).flat_map(|token| (token % 5).to_le_bytes());
    fs::write(folder.path().join("t.bin"), tokens.collect::<Vec<u8>>()).unwrap();
    write(&folder, "gpt2", &gpt2_config(), &gpt2_tensors());
    write(&folder, "llama", &llama_config(), &llama_tensors());
    folder
}

fn import(folder: &Folder, from: &str, out: &str) -> Ended {
    folder
        .alone(&format!("{DATA} --init-from {from} --out {out}"))
        .run()
}

fn export(folder: &Folder, from: &str, to: &str) -> Ended {
    let words = format!("export --format hf --checkpoint {from} {to}");
    folder.alone(&words).run()
}

fn model(folder: &Folder, out: &str) -> std::path::PathBuf {
    folder
        .path()
        .join(out)
        .join("checkpoints/step-00000000/model.safetensors")
}

#[test]
fn models_come_back_from_hugging_face_as_they_went() {
    let folder = begun("round-trip");
    let bytes = |path: &str| fs::read(folder.path().join(path)).unwrap();
    for (name, tensors) in [("gpt2", gpt2_tensors()), ("llama", llama_tensors())] {
        let [out, there, again, there_again] =
            ["1", "exported/2", "3", "4"].map(|end| format!("{name}-{end}"));
        import(&folder, name, &out).assert_well();
        export(&folder, &out, &there).assert_well();
        let exported = folder.path().join(&there).join("model.safetensors");
        assert!(read_tensors(&exported) == tensors, "{name}");
        import(&folder, &there, &again).assert_well();
        assert!(
            fs::read(model(&folder, &out)).unwrap() == fs::read(model(&folder, &again)).unwrap()
        );
        // A run of ours brings its model along, too.
        import(&folder, &again, &format!("{name}-5")).assert_well();
        // What an export that was killed left does not matter.
        let left = folder.path().join(format!(".{there_again}.exporting"));
        fs::create_dir(&left).unwrap();
        fs::write(left.join("model.safetensors"), "half").unwrap();
        export(&folder, &format!("{name}-5"), &there_again).assert_well();
        for file in ["config.json", "model.safetensors"] {
            assert!(bytes(&format!("{there}/{file}")) == bytes(&format!("{there_again}/{file}")));
        }
        assert!(!left.exists());
    }
    let ended = export(&folder, "gpt2-1", "gpt2");
    let text = ended.assert_fails(2);
    assert!(
        text.contains("gpt2: expected a new or empty folder"),
        "{ended}"
    );
    let gpt2 = read_tensors(&model(&folder, "gpt2-1"));
    let (_, there) = &gpt2_tensors()["transformer.h.0.attn.c_attn.weight"];
    let (_, here) = &gpt2["blocks.0.attention.mix.qkv.weight"];
    assert_eq!((here[1], here[4 * 7 + 2]), (there[12], there[12 * 2 + 7]));
    let llama = read_tensors(&model(&folder, "llama-1"));
    let rows = |names: &[&str]| -> Vec<f32> {
        let of = |name: &&str| {
            llama_tensors()[&format!("model.layers.0.{name}.weight")]
                .1
                .clone()
        };
        names.iter().flat_map(of).collect()
    };
    let attention = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
    assert_eq!(
        llama["blocks.0.attention.mix.qkv.weight"].1,
        rows(&attention)
    );
    assert_eq!(
        llama["blocks.0.mlp.up.weight"].1,
        rows(&["mlp.gate_proj", "mlp.up_proj"])
    );
}

#[test]
fn shards_and_names_of_old_versions_give_the_same_model() {
    let folder = begun("shards");
    import(&folder, "gpt2", "gpt2-1").assert_well();
    import(&folder, "llama", "llama-1").assert_well();

    let path = folder.path().join("llama");
    fs::remove_file(path.join("model.safetensors")).unwrap();
    let mut first = llama_tensors();
    let second = first.split_off("model.layers.0.self_attn");
    let mut files = BTreeMap::new();
    for (name, part) in [("a.safetensors", &first), ("b.safetensors", &second)] {
        write_tensors(&path.join(name), part);
        files.extend(part.keys().map(|tensor| (tensor.clone(), name)));
    }
    let index = json!({ "metadata": {}, "weight_map": files }).to_string();
    fs::write(path.join("model.safetensors.index.json"), index).unwrap();
    import(&folder, "llama", "llama-2").assert_well();
    let bytes = |out: &str| fs::read(model(&folder, out)).unwrap();
    assert!(bytes("llama-1") == bytes("llama-2"));
    // As in transformers, a single file comes before the index, also before one without shards.
    let mut other = llama_tensors();
    other.get_mut("model.norm.weight").unwrap().1[1] = -9.0;
    write_tensors(&path.join("model.safetensors"), &other);
    for out in ["llama-3", "llama-4"] {
        import(&folder, "llama", out).assert_well();
        assert!(read_tensors(&model(&folder, out))["norm.weight"].1[1] == -9.0);
        let _ = fs::remove_file(path.join("b.safetensors"));
    }
    fs::remove_file(path.join("model.safetensors")).unwrap();
    let ended = import(&folder, "llama", "out");
    assert!(
        ended.assert_fails(74).contains("llama/b.safetensors"),
        "{ended}"
    );
    // Not a file: a pipe would be waited for.
    fs::create_dir(path.join("b.safetensors")).unwrap();
    let ended = import(&folder, "llama", "out");
    assert!(ended.assert_fails(65).contains("b.safetensors"), "{ended}");

    let mut old: Tensors = gpt2_tensors();
    old.insert(
        "lm_head.weight".into(),
        old["transformer.wte.weight"].clone(),
    );
    old.insert(
        "transformer.h.0.attn.bias".into(),
        (vec![1, 1, 3, 3], vec![1.0; 9]),
    );
    let old = old.into_iter();
    let old = old.map(|(name, tensor)| (name.replace("transformer.", ""), tensor));
    write(&folder, "old", &gpt2_config(), &old.collect());
    import(&folder, "old", "gpt2-2").assert_well();
    assert!(bytes("gpt2-1") == bytes("gpt2-2"));
}

#[test]
fn a_run_is_resumed_without_the_weights_that_it_began_with() {
    let folder = begun("resumed");
    let run = |steps: &str| {
        let words = DATA.replace("--steps 0", steps);
        let words = format!("{words} --init-from gpt2 --schedule constant --resume auto --out out");
        folder.alone(&words).run().assert_well();
    };
    run("--steps 1");
    fs::remove_file(folder.path().join("gpt2/model.safetensors")).unwrap();
    run("--steps 2");
}

#[test]
fn a_padding_token_in_the_data_keeps_its_row_as_in_transformers() {
    let folder = begun("untrained");
    let mut config = llama_config();
    for (name, pad) in [("pad", 4), ("negative", -1)] {
        config["pad_token_id"] = json!(pad);
        write(&folder, name, &config, &llama_tensors());
        let words = "--batch-size 2 --steps 1 --weight-decay 0 --device cpu --threads 1";
        let data = "--data tokens:t.bin,vocabulary=5";
        let out = format!("{data} {words} --init-from {name} --out {name}-out");
        folder.alone(&out).run().assert_well();
        let path = format!("{name}-out/checkpoints/step-00000001/model.safetensors");
        let trained = read_tensors(&folder.path().join(path));
        let (_, rows) = &trained["embedding.tokens.weight"];
        let (_, before) = &llama_tensors()["model.embed_tokens.weight"];
        for (token, (row, before)) in rows.chunks(4).zip(before.chunks(4)).enumerate() {
            assert_eq!(row == before, token == 4, "{token}");
        }
        export(&folder, &format!("{name}-out"), &format!("{name}-there")).assert_well();
        let config = fs::read(folder.path().join(format!("{name}-there/config.json"))).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        assert_eq!(config["pad_token_id"], pad, "as in the folder");
    }
}

#[cfg(feature = "mpi")]
#[test]
fn ranks_with_different_weights_end_the_job() {
    let folder = begun("different-weights");
    for (name, first) in [("first", 0.0), ("second", 0.5)] {
        let path = folder.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::copy(folder.path().join("t.bin"), path.join("t.bin")).unwrap();
        let mut tensors = gpt2_tensors();
        tensors.get_mut("transformer.ln_f.bias").unwrap().1[0] = first;
        write(&folder, &format!("{name}/gpt2"), &gpt2_config(), &tensors);
    }
    let words = format!("{DATA} --init-from gpt2 --out out");
    let ended = folder.in_folders(&["first", "second"], &words).run();
    let text = ended.assert_fails(78);
    assert!(
        text.contains("the model's initial weights") && text.contains("--init-from"),
        "{ended}"
    );
}

#[test]
fn a_folder_of_hugging_face_is_evaluated_as_the_run_that_it_becomes() {
    let folder = begun("no-run");
    let data = "--data tokens:t.bin,vocabulary=5 --device cpu";
    let evaluate = |words: &str| {
        let ended = folder
            .started(2, &format!("eval {data} {words} --json"))
            .run();
        ended.assert_well();
        let json: Value = serde_json::from_str(&ended.stdout).unwrap();
        json["loss"].as_f64().unwrap()
    };
    for (name, words) in [("gpt2", ""), ("llama", ""), ("gpt2", "--context 2")] {
        let import = format!(
            "{data} --init-from {name} {words} --batch-size 2 --steps 0 --out of-{name}{}",
            words.len()
        );
        folder.alone(&import).run().assert_well();
        let [there, here] = [
            format!("{name} {words}"),
            format!("of-{name}{}", words.len()),
        ]
        .map(|of| evaluate(&format!("--checkpoint {of}")));
        assert!(there == here, "{name} {words}: {there} {here}");
    }
    let ended = folder
        .alone(&format!("eval {data} --checkpoint of-gpt20 --context 2"))
        .run();
    let text = ended.assert_fails(2);
    assert!(
        text.contains("--context 2: expected a Hugging Face folder"),
        "{ended}"
    );
    for whole in ["of-gpt20", "gpt2"] {
        let words = format!("eval {data} --checkpoint {whole} --init-from llama");
        let ended = folder.alone(&words).run();
        let text = ended.assert_fails(2);
        assert!(
            text.contains("--init-from llama: expected adapters (--lora)"),
            "{ended}"
        );
    }
}
