//! What is refused, by name and before training.

use super::*;

#[test]
fn tensors_that_do_not_fit_are_refused_before_training() {
    let folder = begun("tensors");
    let refused = |name: &str, change: &dyn Fn(&mut Tensors), expected: &str| {
        let mut tensors = gpt2_tensors();
        change(&mut tensors);
        write(&folder, name, &gpt2_config(), &tensors);
        let ended = import(&folder, name, "out");
        let text = ended.assert_fails(65);
        assert!(text.contains(expected) && text.contains(name), "{ended}");
    };
    let norm = "transformer.h.0.ln_2.weight";
    let missing = |all: &mut Tensors| drop(all.remove(norm));
    refused("missing", &missing, &format!("it lacks {norm}"));
    let more = |all: &mut Tensors| drop(all.insert("h.1.ln_1.bias".into(), (vec![1], vec![0.5])));
    refused("more", &more, "it has transformer.h.1.ln_1.bias, which");
    let shape = |all: &mut Tensors| drop(all.insert(norm.into(), (vec![2, 2], vec![0.5; 4])));
    refused(
        "shape",
        &shape,
        &format!("{norm} has the shape [2, 2], and [4] in the model"),
    );
    let nan = |all: &mut Tensors| all.get_mut(norm).unwrap().1[2] = f32::NAN;
    refused(
        "nan",
        &nan,
        &format!("{norm}: expected values up to 1e6, got NaN"),
    );
    let wpe = "transformer.wpe.weight";
    let longer = |all: &mut Tensors| drop(all.insert(wpe.into(), (vec![4, 4], vec![0.5; 16])));
    refused(
        "longer",
        &longer,
        &format!("{wpe} has the shape [4, 4], and [3, 4] in the model"),
    );
    let head =
        |all: &mut Tensors| drop(all.insert("lm_head.weight".into(), (vec![5, 4], vec![0.5; 20])));
    refused(
        "head",
        &head,
        "lm_head.weight: expected the values of the embedding",
    );
    let file = folder.path().join("gpt2/model.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 4]).unwrap();
    let ended = import(&folder, "gpt2", "out");
    assert!(ended.assert_fails(65).contains("cut short"), "{ended}");
    assert!(!folder.out().exists());
}

#[test]
fn folders_that_are_none_are_refused_with_what_to_do() {
    let folder = begun("no-folders");
    let refused = |name: &str, exit_code: i32, expected: &str| {
        let ended = import(&folder, name, "out");
        let text = ended.assert_fails(exit_code);
        assert!(text.contains(expected), "{ended}");
    };
    for (key, value, expected) in [
        (
            "n_head",
            json!(-2),
            "n_head -2: expected a whole number; help",
        ),
        (
            "n_layer",
            json!(1.5),
            "n_layer 1.5: expected a whole number; help",
        ),
        (
            "vocab_size",
            json!(0),
            "vocab_size 0: expected at least 1; help",
        ),
        (
            "n_layer",
            json!(2_000_000),
            "--layers 2000000: expected a whole number from 1 to 1024",
        ),
    ] {
        let (name, mut config) = (format!("{key}-{value}"), gpt2_config());
        config[key] = value;
        write(&folder, &name, &config, &gpt2_tensors());
        refused(&name, 65, expected);
    }
    refused("missing", 74, "cannot open missing");
    let adapter = folder.path().join("llama/adapter_config.json");
    fs::write(adapter, "{}").unwrap();
    refused("llama", 65, "llama: expected a whole model, got an adapter");
    fs::remove_file(folder.path().join("gpt2/model.safetensors")).unwrap();
    fs::write(folder.path().join("gpt2/pytorch_model.bin"), "").unwrap();
    refused(
        "gpt2",
        65,
        "expected model.safetensors or model.safetensors.index.json, got neither",
    );
}

#[test]
fn a_file_that_is_missing_is_named_before_data_are_read() {
    let folder = begun("missing");
    let gpt2 = folder.path().join("gpt2");
    fs::remove_file(gpt2.join("model.safetensors")).unwrap();
    let index = r#"{"weight_map": {"wte.weight": "model-1.safetensors"}}"#;
    fs::write(gpt2.join("model.safetensors.index.json"), index).unwrap();
    let ended = folder
        .alone("--init-from gpt2 --data none.jsonl --out out")
        .run();
    let text = ended.assert_fails(74);
    assert!(text.contains("model-1.safetensors"), "{ended}");
    // A model that would fill the memory is not made first.
    let folder = begun("larger");
    let config = fs::read_to_string(folder.path().join("llama/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["vocab_size"] = (1 << 24).into();
    fs::write(folder.path().join("llama/config.json"), config.to_string()).unwrap();
    for words in ["eval --checkpoint llama", "--init-from llama --out out"] {
        let ended = folder.alone(&format!("{words} --data none.jsonl")).run();
        let text = ended.assert_fails(65);
        assert!(text.contains("has the shape"), "{ended}");
    }
}

#[test]
fn settings_that_contradict_the_folder_are_refused_by_name() {
    let folder = begun("contradictions");
    let refused = |words: &str, exit_code: i32, expected: &str| {
        let ended = import(&folder, &format!("gpt2 {words}"), "out");
        let text = ended.assert_fails(exit_code);
        assert!(text.contains(expected), "{ended}");
    };
    refused(
        "--layers 4",
        2,
        "--layers 4: expected 1, as in gpt2; help: leave out --model",
    );
    refused("--model gpt,bias=false", 2, "--bias false: expected true");
    refused("--model gpt2", 2, ": expected ");
    refused("--model mlp", 2, "--model mlp: expected gpt");
    refused("--context 4", 2, "--context 4: expected at most 3");
    refused("--vocab 6", 2, "--vocab 6: expected 5");
    let toml = "init-from = \"gpt2\"\nheads = 1\n";
    fs::write(folder.path().join("heads.toml"), toml).unwrap();
    let ended = folder
        .alone(&format!("{DATA} --config heads.toml --out out"))
        .run();
    let text = ended.assert_fails(2);
    assert!(
        text.contains("--heads 1: expected 2, as in gpt2"),
        "{ended}"
    );

    let fits = "gpt2 --model gpt,context=2 --vocab 5 --kv-heads 0 --mlp-width 6 --dropout 0.5";
    import(&folder, fits, "fits").assert_well();
    let (shape, values) = &read_tensors(&model(&folder, "fits"))["embedding.positions.weight"];
    assert_eq!(shape, &[2, 4]);
    assert!(*values == gpt2_tensors()["transformer.wpe.weight"].1[..8]);

    let mut dropout = gpt2_config();
    dropout["attn_pdrop"] = json!(0.1);
    write(&folder, "dropout", &dropout, &gpt2_tensors());
    let ended = import(&folder, "dropout", "out");
    let text = ended.assert_fails(65);
    assert!(
        text.contains("attn_pdrop 0.1: expected 0") && text.contains("give --dropout"),
        "{ended}"
    );
    import(&folder, "dropout --dropout 0", "decided").assert_well();
}

#[test]
fn a_model_that_transformers_does_not_have_is_not_exported() {
    let folder = begun("not-exported");
    let tiny = "--layers 1 --heads 1 --width 4 --context 3";
    let words = format!("{DATA} --model gpt {tiny} --mlp relu2 --out out");
    folder.alone(&words).run().assert_well();
    let ended = export(&folder, "out", "there");
    assert!(
        ended.assert_fails(2).contains("--mlp \"relu2\": expected"),
        "{ended}"
    );
    let words = "--data glyphs,rows=8,held-out=0 --hidden 2 --batch-size 8 --steps 0 --out mlp";
    folder.alone(words).run().assert_well();
    let ended = export(&folder, "mlp", "there");
    assert!(
        ended
            .assert_fails(2)
            .contains("expected a model of the family gpt"),
        "{ended}"
    );
    assert!(!folder.path().join("there").exists());
}

/// Each command had another message, some of them about checkpoints.
#[test]
fn gguf_and_names_of_the_hub_are_refused_alike_everywhere() {
    let folder = Folder::new("unread");
    fs::create_dir(folder.path().join("q4")).unwrap();
    for name in ["m.gguf", "q4/m.gguf"] {
        fs::write(folder.path().join(name), "GGUF\u{3}").unwrap();
    }
    for (model, part) in [
        ("m.gguf", r#"from_pretrained(".", gguf_file="m.gguf")"#),
        ("q4", r#"from_pretrained("q4", gguf_file="m.gguf")"#),
        (
            "Qwen/Qwen3-0.6B",
            "hf download Qwen/Qwen3-0.6B --local-dir FOLDER",
        ),
    ] {
        for command in [
            format!("inspect {model}"),
            format!("chat {model}"),
            format!("generate --checkpoint {model} --prompt x"),
            format!("eval --checkpoint {model} --data x.txt"),
            format!("export --format hf --checkpoint {model} to"),
            format!("--init-from {model} --data x.txt --out out"),
        ] {
            let ended = folder.alone(&command).run();
            assert!(
                [2, 65, 74].map(Some).contains(&ended.exit_code()),
                "{command}: {ended}"
            );
            assert!(ended.stderr.contains(part), "{command}: {ended}");
        }
    }
}

#[test]
fn what_a_chat_lacks_is_said_before_weights_are_read() {
    let folder = begun("chat-lacks");
    let llama = folder.path().join("llama");
    // A value that is refused once weights are read.
    let mut tensors = llama_tensors();
    tensors.get_mut("model.norm.weight").unwrap().1[0] = f32::NAN;
    write_tensors(&llama.join("model.safetensors"), &tensors);
    let fails = |part: &str| {
        let ended = folder.alone("chat llama").run();
        assert!(ended.stderr.contains(part), "{ended}");
    };
    fails("expected a model with a tokenizer, got one without");
    for name in ["vocab.json", "merges.txt"] {
        fs::write(llama.join(name), "").unwrap();
    }
    fails("AutoTokenizer.from_pretrained(\"llama\").save_pretrained(\"llama\")");
    let golden = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/golden/tokenizer/tokenizer.json"
    );
    fs::copy(golden, llama.join("tokenizer.json")).unwrap();
    fails("chat template");
}

#[test]
fn a_folder_is_inspected() {
    let folder = begun("inspected-folder");
    let ended = folder.alone("inspect llama").run();
    ended.assert_well();
    for part in [
        "LlamaForCausalLM, 1 layers of 4 columns",
        "model.layers.0.mlp.gate_proj.weight",
    ] {
        assert!(ended.stdout.contains(part), "{part}: {ended}");
    }
}
