//! What can be verified: transformers in bf16, adapters, and ranks without `--same-bits`.

use super::*;

const GPT: &str = "--data text.txt --val-split 0 --batch-size 4 --log-every 1 --threads 1 --steps 3 \
                   --checkpoint-every 2 --model gpt,context=8,layers=1,width=16,heads=2";

#[test]
fn a_transformer_in_bf16_and_adapters_beside_it_are_as_claimed() {
    let folder = Folder::new("verify-gpt");
    let text = "the quick brown fox jumps over the lazy dog. ".repeat(20);
    fs::write(folder.path().join("text.txt"), text).unwrap();
    folder
        .alone(&format!("{GPT} --dtype bf16 --out run"))
        .run()
        .assert_well();
    let (code, text, verdict) = verified(&folder, 1, "--data text.txt");
    assert!(code == Some(0) && verdict["steps"] == 3, "{text}");
    fs::rename(folder.path().join("run"), folder.path().join("base")).unwrap();
    let base = "base/checkpoints/step-00000003/model.safetensors";
    let lora = format!("{GPT} --lora rank=2 --init-from {base} --out run");
    folder.alone(&lora).run().assert_well();
    let (code, text, _) = verified(&folder, 1, &format!("--data text.txt --init-from {base}"));
    assert_eq!(code, Some(0), "{text}");
    // Its base is read only from where the person says.
    let (code, text, _) = verified(&folder, 1, "--data text.txt");
    assert!(code == Some(2) && text.contains("--init-from "), "{text}");
    // Another base.
    let other = format!("{GPT} --seed 1 --out other");
    folder.alone(&other).run().assert_well();
    let words = format!(
        "--data text.txt --init-from {}",
        base.replace("base", "other")
    );
    let (code, text, _) = verified(&folder, 1, &words);
    let found = "the first difference is in the loss of step 1 (forward)";
    assert!(code == Some(3) && text.contains(found), "{text}");
}

#[test]
fn without_same_bits_a_run_is_verified_on_its_own_number_of_ranks() {
    let folder = Folder::new("verify-ranks");
    let words = "--data synthetic:classification,rows=96,held-out=0,features=5,classes=3 --hidden 6 \
                 --batch-size 24 --steps 4 --log-every 2 --threads 1 --out run";
    folder.started(2, words).run().assert_well();
    let (code, text, verdict) = verified(&folder, 1, "");
    assert!(code == Some(4) && text.contains("--ranks 2"), "{text}");
    assert_eq!(verdict["verdict"], "cannot be told here", "{verdict}");
    let (code, text, verdict) = verified(&folder, 2, "");
    assert_eq!(code, Some(0), "{text}");
    // Steps 1, 2 and 4 are in the log.
    assert_eq!(verdict["steps_compared"], 3, "{verdict}");
}
