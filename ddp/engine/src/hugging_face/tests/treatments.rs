//! Keys of config.json: which are read, and which are refused.

use super::*;

#[test]
fn what_is_computed_otherwise_here_is_refused_by_name() {
    let refused = |mut config: Value, key: &str, value: Value| {
        config[key] = value;
        let error = described(&config).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!("{CONFIG_FILE}: {key} ")), "{text}");
        assert!(text.contains("; help: "), "{text}");
        assert_eq!(error.exit_code(), 65);
    };
    refused(gpt2(), "architectures", json!(["GPT2Model"]));
    refused(gpt2(), "activation_function", json!("relu"));
    refused(gpt2(), "scale_attn_weights", json!(false));
    refused(gpt2(), "scale_attn_by_inverse_layer_idx", json!(true));
    refused(gpt2(), "add_cross_attention", json!(true));
    refused(gpt2(), "n_layer", json!("many"));
    refused(gpt2(), "model_type", json!("gpt_neo"));
    refused(llama(), "pad_token_id", json!(50));
    refused(gpt2(), "quantization_config", json!({ "bits": 4 }));
    let mut quantized = gpt2();
    quantized["quantization_config"] = json!({ "bits": 4 });
    let text = described(&quantized).unwrap_err().to_string();
    assert!(
        text.contains("expected weights in bf16, f16 or f32"),
        "{text}"
    );
    refused(llama(), "hidden_act", json!("gelu"));
    refused(llama(), "attention_bias", json!(true));
    refused(llama(), "mlp_bias", json!(true));
    refused(llama(), "head_dim", json!("wide"));
    refused(llama(), "sliding_window", json!(4096));
    for scaling in [
        json!({ "type": "dynamic", "factor": 2.0 }),
        json!({ "type": "longrope", "short_factor": [1.0], "long_factor": [1.0] }),
        json!({ "type": "linear", "factor": "2" }),
        json!({ "type": "linear", "factor": 2.0, "beta_fast": 3.0 }),
        json!({ "rope_theta": 500.0, "rope_type": "llama3", "factor": 8.0 }),
    ] {
        refused(llama(), "rope_scaling", scaling.clone());
        let mut without = llama();
        without["rope_parameters"] = Value::Null;
        refused(without, "rope_parameters", scaling);
    }
    let impossible = json!({ "architectures": ["GPT2LMHeadModel"], "n_head": 7 });
    let text = described(&impossible).unwrap_err().to_string();
    assert!(text.contains("`heads` 7: expected a divisor"), "{text}");
}

#[test]
fn families_that_are_not_read_are_refused_with_the_reason() {
    for (class, why) in [
        (
            "Qwen3MoeForCausalLM",
            "since mixtures of experts are not supported",
        ),
        ("Gemma3ForConditionalGeneration", "since models with images"),
        ("T5Model", "Gemma3ForCausalLM\"]; help"),
    ] {
        let text = described(&json!({ "architectures": [class] }))
            .unwrap_err()
            .to_string();
        assert!(text.contains(why), "{text}");
    }
}

/// The keys of transformers' classes with their defaults, written by tests/peers/config_keys.py.
fn keys_there() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/config_keys.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn every_key_of_transformers_has_a_treatment_which_is_kept() {
    let there = keys_there();
    for architecture in Architecture::all() {
        let (name, class) = (architecture.class(), &there[architecture.class()]);
        let mut config = match architecture.model_type() {
            "gpt2" => gpt2(),
            _ => llama(),
        };
        config["architectures"] = json!([name]);
        config["model_type"] = json!(architecture.model_type());
        // As before version 5.
        if config
            .as_object_mut()
            .unwrap()
            .remove("rope_parameters")
            .is_some()
        {
            config["rope_theta"] = json!(500.0);
            config["pad_token_id"] = json!(3);
        }
        if architecture.model_type() == "phi3" {
            let factors = json!({ "type": "su", "short_factor": [1.5], "long_factor": [2] });
            config["rope_scaling"] = factors;
        }
        let treatment = |key: &str| architecture.treatment(key).map(|(found, _)| found);
        let defaults = class["fields"].as_object().unwrap();
        for key in defaults.keys() {
            let found = treatment(key);
            let is_used = found.is_some_and(|found| found != "refused");
            assert!(key.starts_with('_') || is_used, "{name} {key}: {found:?}");
        }
        for key in class["others"].as_array().unwrap() {
            let key = key.as_str().unwrap();
            assert!(
                key.starts_with('_') || treatment(key).is_some(),
                "{name} {key}"
            );
        }
        // All defaults are those of transformers.
        let of_class = |mut config: Value| {
            config["architectures"] = json!([name]);
            if name == "GPT2LMHeadModel" {
                config["attn_pdrop"] = json!(0);
            }
            described(&config).unwrap()
        };
        let all = of_class(Value::Object(defaults.clone()));
        assert_eq!(all, of_class(json!({})), "{name}");

        let base = described(&config).unwrap();
        for (key, treatment, only) in architecture.keys() {
            let changed = |value: Value| {
                let mut config = config.clone();
                config[key] = value;
                described(&config)
            };
            for value in [
                json!(true),
                json!(false),
                json!(5),
                json!(0.25),
                json!("other"),
            ] {
                let result = changed(value.clone());
                let what = format!("{name} {key} {value}: {result:?}");
                let is_named = || {
                    let text = result.as_ref().unwrap_err().to_string();
                    text.contains(&format!("{key} ")) || text.contains(&format!("{key}:"))
                };
                match treatment {
                    "irrelevant" => {
                        assert_eq!(result.as_ref().ok(), Some(&base), "{what}")
                    }
                    "refused" => assert!(result.is_err() && is_named(), "{what}"),
                    "setting" | "special" => {
                        let now = config.get(key).or(defaults.get(key));
                        let is_base = result.as_ref().ok() == Some(&base);
                        assert_eq!(is_base, now == Some(&value), "{what}");
                    }
                    "only" if value == only => {
                        assert_eq!(result.as_ref().ok(), Some(&base), "{what}");
                    }
                    "only" => assert!(result.is_err() && is_named(), "{what}"),
                    other => panic!("{key}: {other}"),
                }
            }
        }
    }
}
