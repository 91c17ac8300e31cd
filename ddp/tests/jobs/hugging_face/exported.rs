//! What a run from a Hugging Face folder did not change comes back from that folder.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::{Value, json};

use super::read_tensors;
use crate::support::job::{Ended, Folder};

const MODEL: &str =
    "--model gpt,layers=1,heads=2,width=16,context=16,position=rope,norm=rms,mlp=swiglu,bias=false";
const DATA: &str = "--data books --device cpu --threads 1 --batch-size 4 --steps";
/// Of a model that answers: none of them is used for training.
const FILES: [&str; 6] = [
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

fn well(folder: &Folder, words: &str) -> Ended {
    let ended = folder.alone(words).run();
    ended.assert_well();
    ended
}

fn config_of(folder: &Folder, name: &str) -> Value {
    let text = fs::read_to_string(folder.path().join(name).join("config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// A folder with texts as tokens, `books`, and a model for chats, `base`, with their tokenizer.
fn with_base(name: &str) -> Folder {
    let folder = Folder::new(name);
    let line = |number: usize| format!("{{\"text\": \"To be is to do, number {number}. \"}}\n");
    let lines: String = (0..60).map(line).collect();
    fs::write(folder.path().join("a.jsonl"), lines).unwrap();
    well(&folder, "tokenize a.jsonl --train-bpe 270 --out books");
    well(&folder, &format!("{MODEL} {DATA} 2 --out first"));
    well(&folder, "export --format hf --checkpoint first base");
    let mut config = config_of(&folder, "base");
    config.as_object_mut().unwrap().remove("torch_dtype");
    config["dtype"] = json!("bfloat16");
    config["initializer_range"] = json!(0.041);
    config["_model_name_or_path"] = json!("it came from GGUF");
    (config["bos_token_id"], config["eos_token_id"]) = (json!(1), json!([2, 7]));
    fs::write(folder.path().join("base/config.json"), config.to_string()).unwrap();
    for name in FILES.iter().filter(|name| **name != "tokenizer.json") {
        let text = match *name {
            "generation_config.json" => r#"{"eos_token_id": [2, 7]}"#.into(),
            name if name.ends_with(".json") => format!("{{\"of\": {name:?}}}"),
            name => format!("{{# {name} #}}"),
        };
        fs::write(folder.path().join("base").join(name), text).unwrap();
    }
    folder
}

/// A model that had learnt to answer no longer ended its answers after more texts: its export had
/// neither a template nor its end tokens.
#[test]
fn continued_pretraining_keeps_the_template_the_end_tokens_and_the_keys_of_its_base() {
    let folder = with_base("exported");
    let read = |name: &str| fs::read(folder.path().join(name)).unwrap();
    // By way of another run, too.
    well(&folder, &format!("{DATA} 2 --init-from base --out tuned"));
    well(
        &folder,
        &format!("{DATA} 2 --init-from tuned --seed 2 --out again"),
    );
    let mut expected = config_of(&folder, "base");
    expected["dtype"] = json!("float32");
    for (run, to) in [("tuned", "hf"), ("again", "hf2")] {
        let ended = well(
            &folder,
            &format!("export --format hf --checkpoint {run} {to}"),
        );
        assert!(!ended.stderr.contains("WARN"), "{ended}");
        for name in FILES {
            let [there, here] = ["base", to].map(|it| read(&format!("{it}/{name}")));
            assert!(there == here, "{to}/{name}");
        }
        assert_eq!(config_of(&folder, to), expected, "{to}");
    }
    assert!(read("hf/model.safetensors") != read("hf2/model.safetensors"));

    well(
        &folder,
        "export --format hf --checkpoint tuned --dtype bf16 half",
    );
    expected["dtype"] = json!("bfloat16");
    assert_eq!(config_of(&folder, "half"), expected);
    let [whole, half] = ["hf", "half"].map(|it| folder.path().join(it).join("model.safetensors"));
    let bytes = |path| fs::metadata(path).unwrap().len();
    assert!(bytes(&half) < bytes(&whole) * 6 / 10);
    // It is read back, rounded to the nearest.
    well(&folder, &format!("{DATA} 0 --init-from half --out back"));
    well(&folder, "export --format hf --checkpoint back rounded");
    let rounded = read_tensors(&folder.path().join("rounded/model.safetensors"));
    for (name, (shape, values)) in read_tensors(&whole) {
        let nearest = values.iter().map(|value| {
            let bits = value.to_bits();
            f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
        });
        assert_eq!(rounded[&name], (shape, nearest.collect()), "{name}");
    }

    fs::rename(folder.path().join("base"), folder.path().join("moved")).unwrap();
    let ended = well(&folder, "export --format hf --checkpoint tuned without");
    assert!(
        ended.stderr.contains("the export lacks what it would take"),
        "{ended}"
    );
}

/// A folder from elsewhere must not choose files of this machine for an export.
#[test]
fn an_export_takes_no_file_that_a_base_links_to_except_from_the_cache_of_the_hub() {
    let folder = with_base("exported-links");
    let path = |name: &str| folder.path().join(name);
    fs::create_dir_all(path("hub/snapshots")).unwrap();
    fs::create_dir_all(path("hub/blobs")).unwrap();
    fs::rename(path("base"), path("hub/snapshots/1")).unwrap();
    well(
        &folder,
        &format!("{DATA} 2 --init-from hub/snapshots/1 --out tuned"),
    );
    fs::write(path("secret"), "a key").unwrap();
    let link = |to: &str, name: &str| {
        let file = path("hub/snapshots/1").join(name);
        let _ = fs::remove_file(&file);
        symlink(path(to), file).unwrap();
    };
    for name in FILES {
        let file = path("hub/snapshots/1").join(name);
        fs::rename(file, path("hub/blobs").join(name)).unwrap();
        link(&format!("hub/blobs/{name}"), name);
    }
    well(&folder, "export --format hf --checkpoint tuned cached");
    for name in FILES {
        assert!(path("cached").join(name).is_file(), "{name}");
    }
    for (at, name) in FILES
        .iter()
        .enumerate()
        .filter(|(_, name)| **name != "tokenizer.json")
    {
        link("secret", name);
        let to = format!("stolen-{at}");
        let ended = well(
            &folder,
            &format!("export --format hf --checkpoint tuned {to}"),
        );
        assert!(
            ended.stderr.contains(name) && ended.stderr.contains("got a link"),
            "{ended}"
        );
        let read = |file: &str| fs::read(path(&to).join(file)).unwrap_or_default();
        assert!(FILES.iter().all(|file| read(file) != b"a key"), "{name}");
        link(&format!("hub/blobs/{name}"), name);
    }
    // Nor where it is copied into checkpoints.
    link("secret", "generation_config.json");
    let chats = "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}\n";
    fs::write(path("chats.jsonl"), chats).unwrap();
    let words = "show-tokens chats.jsonl --tokenizer hub/snapshots/1 --context 16";
    let ended = folder.alone(words).run();
    assert!(ended.stderr.contains("got a link"), "{ended}");
}

/// Tokens of another tokenizer, or of an unknown one, have other ends and another template.
#[test]
fn an_export_of_tokens_from_elsewhere_says_what_it_lacks() {
    let folder = with_base("exported-elsewhere");
    fs::remove_file(folder.path().join("books/tokenizer.json")).unwrap();
    well(&folder, &format!("{DATA} 2 --init-from base --out tuned"));
    let ended = well(&folder, "export --format hf --checkpoint tuned hf");
    assert!(
        ended.stderr.contains("takes neither chat template"),
        "{ended}"
    );
    assert!(!folder.path().join("hf/chat_template.jinja").exists());
    let config = config_of(&folder, "hf");
    assert_eq!(config["initializer_range"], json!(0.041));
    assert_eq!(config["eos_token_id"], Value::Null);
    let lora = "--lora rank=2,alpha=4,on=all-linear";
    well(
        &folder,
        &format!("{DATA} 2 --init-from base {lora} --out adapted"),
    );
    let ended = folder
        .alone("export --format hf --checkpoint adapted --dtype bf16 adapter")
        .run();
    let cause = ended.assert_fails(2);
    assert!(
        cause.contains("expected f32, as adapters are written"),
        "{cause}"
    );
}
