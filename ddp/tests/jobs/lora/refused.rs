//! What has no adapters is refused, and an adapter of another base warned of.

use super::*;

#[test]
fn an_adapter_of_another_base_is_warned_of() {
    let folder = begun("lora-other");
    let run = |words: &str| {
        let ended = folder.alone(words).run();
        ended.assert_well();
        ended
    };
    run(&format!("{RUN} --lora rank=4 --steps 1 --out OUT"));
    run("export --format hf --checkpoint out adapted");
    let path = |name: &str| folder.path().join(name);
    for (name, change) in [("same", 0.0), ("other", 1e-3)] {
        fs::create_dir(path(name)).unwrap();
        fs::copy(path("base/config.json"), path(name).join("config.json")).unwrap();
        let mut tensors = base();
        tensors.get_mut("model.norm.weight").unwrap().1[5] += change;
        write_tensors(&path(name).join("model.safetensors"), &tensors);
    }
    // What PEFT writes has the name of a model alone.
    let config = path("adapter/adapter_config.json");
    let mut json: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    json["base_model_name_or_path"] = json!("someone/same");
    fs::write(&config, json.to_string()).unwrap();
    for (base, adapter, is_warned_of) in [
        ("base", "adapted", false),
        ("same", "adapted", false),
        ("other", "adapted", true),
        ("same", "adapter", false),
        ("other", "adapter", true),
    ] {
        let from = format!("--init-from {base} --lora from={adapter}");
        let words = format!(
            "{} --steps 0 --out {base}-{adapter}",
            RUN.replace("--init-from base", &from)
        );
        let trained = run(&words);
        let used = run(&format!(
            "eval --checkpoint {adapter} --init-from {base} {DATA} --device cpu"
        ));
        for ended in [trained, used] {
            let warned = ended.stderr.contains("the adapter was made beside");
            assert_eq!(warned, is_warned_of, "{base} {adapter}: {ended}");
        }
    }
}

#[test]
fn what_has_no_adapters_is_refused_by_name() {
    let folder = begun("lora-refused");
    let refused = |words: &str, exit_code: i32, expected: &str| {
        let from = if words.contains("--init-from") {
            ""
        } else {
            "--init-from base"
        };
        let words = format!("{} {words}", RUN.replace("--init-from base", from));
        let ended = folder.alone(&format!("{words} --steps 1 --out OUT")).run();
        let text = ended.assert_fails(exit_code);
        assert!(text.contains(expected), "{words}: {ended}");
    };
    refused(
        "--lora rank=4,on=q_prj",
        2,
        "--lora on=q_prj: expected all-linear, or a name",
    );
    refused("--lora rank=4,on=lm_head", 2, "--lora on=lm_head");
    refused("--lora alpha=4", 2, "expected a rank");
    refused("--lora rank=4 --optimizer muon", 2, "help: use adamw");
    refused(
        "--lora rank=4 --init-from adapter",
        65,
        "got an adapter (adapter_config.json)",
    );
    refused("--lora from=base", 74, "base/adapter_config.json");
    refused("--lora from=adapter,rank=16", 2, "expected rank=4, as in");
    let path = folder.path().join("adapter/adapter_config.json");
    let written: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    for (key, value) in [
        ("use_dora", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("bias", json!("all")),
        ("rank_pattern", json!({ "q_proj": 8 })),
        ("init_lora_weights", json!("pissa")),
        ("peft_type", json!("IA3")),
        ("r", json!(0)),
        ("r", json!(4.5)),
        ("use_rslora", json!(1)),
        ("another", json!(3)),
    ] {
        let mut config = written.clone();
        config[key] = value;
        fs::write(&path, config.to_string()).unwrap();
        refused(
            "--lora from=adapter",
            65,
            &format!("adapter_config.json: {key} "),
        );
    }
    fs::write(&path, written.to_string()).unwrap();
    let mut tensors = adapter();
    tensors.pop_last();
    write_tensors(
        &folder.path().join("adapter/adapter_model.safetensors"),
        &tensors,
    );
    refused(
        "--lora from=adapter",
        65,
        "model.layers.1.self_attn.v_proj.lora_B.weight",
    );

    folder
        .alone(&format!("{RUN} --lora rank=4 --steps 1 --out OUT"))
        .run()
        .assert_well();
    refused(
        "--lora rank=4 --init-from out",
        65,
        "expected a whole model, got adapters",
    );
}
