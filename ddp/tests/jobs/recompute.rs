//! `--recompute`, `--recompute-parts` and `--memory`: the same bits as without, on any number of
//! ranks and after resuming.

use crate::support::job::{Ended, Folder, all_at_once};
use crate::support::metrics_log::model_bytes;

const GPT: &str = "--model gpt,layers=3,heads=2,width=16,context=16,tied=false --data book.txt";
const VIT: &str = "--model vit,layers=3,heads=2,width=16,patch=7 --data glyphs,rows=60,held-out=16";
const FLAGS: &str = "--dropout 0.2 --batch-size 8 --micro-batch 3 --lr 0.01 --schedule constant \
                     --warmup-steps 0 --checkpoint-every 3 --threads 1 --out OUT";

fn with_text() -> Folder {
    let folder = Folder::new("recompute");
    let text = "To be is to do, to do is to be, do be do be do. ".repeat(40);
    std::fs::write(folder.path().join("book.txt"), text).unwrap();
    folder
}

/// The bytes of the model that these words make.
fn model_of(ranks: usize, words: &str) -> Vec<u8> {
    let folder = with_text();
    let words = format!("{words} {FLAGS} --steps 6");
    let job = match ranks {
        1 => folder.alone(&words),
        _ => folder.together(&words),
    };
    job.run().assert_well();
    model_bytes(&folder.out(), 6)
}

#[test]
fn what_is_computed_again_has_the_same_bits_on_one_and_two_ranks() {
    for (ranks, model, recompute) in [
        (1, GPT, "block"),
        (1, VIT, "attention --recompute-blocks 2"),
        (2, GPT, "block --recompute-blocks 1 --bucket-mb 0.01"),
        (2, VIT, "attention --zero 1"),
    ] {
        let again = model_of(ranks, &format!("{model} --recompute {recompute}"));
        let is_same = again == model_of(ranks, model);
        assert!(is_same, "{ranks} ranks, {model}, {recompute}");
    }
}

/// The fewest blocks that are enough, with the bits of a run that has all the memory.
#[test]
fn a_limit_of_memory_chooses_what_is_computed_again() {
    let folder = with_text();
    let flags = "--batch-size 64 --steps 1 --threads 1 --out";
    let run =
        |out: usize, memory: &str| folder.alone(&format!("{GPT} {flags} {out} {memory}")).run();
    let mut needs = Vec::new();
    let mut memory = String::new();
    // Each allows a little less than the one before needed.
    for number in 0.. {
        let ended = run(number, &memory);
        if ended.stderr.contains("which a rank needs at best") {
            ended.assert_fails(2);
            break;
        }
        ended.assert_well();
        let bytes = |out: usize| model_bytes(&folder.path().join(out.to_string()), 1);
        assert!(bytes(number) == bytes(0));
        if number > 0 {
            let (before, _) = ended.stderr.split_once(": a rank needs ").unwrap();
            needs.push(before.rsplit("INFO ").next().unwrap().to_string());
        }
        let all = ended
            .stderr
            .rsplit_once("a rank needs ")
            .map_or("2 GB", |it| it.1);
        let (number, unit) = all.split_once(' ').unwrap();
        let number: f64 = number.parse().unwrap();
        memory = format!("--memory {}{}", number - 0.1, &unit[..2]);
    }
    assert_eq!(needs.first().unwrap(), "nothing is computed again");
    assert_eq!(needs.last().unwrap(), "--recompute block in 3 of 3 blocks");
    assert!(
        needs.contains(&"--recompute attention in 2 of 3 blocks".into()),
        "{needs:?}"
    );
}

/// A perceptron has no `--recompute`. The bits are those of a run with enough memory.
#[test]
fn parts_of_any_model_are_computed_again_as_memory_asks() {
    let folder = Folder::new("parts");
    let run = |out: &str, flags: &str| {
        let words = "--data glyphs,rows=512 --hidden 256,512,512,256 --dropout 0.2 --batch-size 512 \
                     --steps 1 --threads 1 --out";
        folder.alone(&format!("{words} {out} {flags}")).run()
    };
    let bytes = |out: &str| model_bytes(&folder.path().join(out), 1);
    let whole = run("whole", "--memory 1GB");
    whole.assert_well();
    assert!(
        whole.stderr.contains("nothing is computed again"),
        "{whole}"
    );
    let least = format!("--memory {}MB", needed_mb(&whole) - 0.1);
    let fitted = run("fitted", &least);
    fitted.assert_well();
    assert!(fitted.stderr.contains("--recompute-parts "), "{fitted}");
    assert!(needed_mb(&fitted) < needed_mb(&whole), "{fitted}");
    let plan = run("plan", &format!("{least} --dry-run"));
    plan.assert_well();
    let together = format!("; together {:.1} MB\nmemory of a rank", needed_mb(&plan));
    assert!(plan.stdout.contains(&together), "{plan}");
    run("all", "--recompute-parts 9").assert_well();
    assert!(bytes("fitted") == bytes("whole") && bytes("all") == bytes("whole"));
    let text = run("none", "--memory 3MB");
    assert!(
        text.assert_fails(2)
            .contains("which a rank needs at best (--recompute-parts"),
        "{text}"
    );
}

/// What a rank needs, in MB, as the log says.
fn needed_mb(ended: &Ended) -> f64 {
    let (_, rest) = ended.stderr.split_once("a rank needs ").unwrap();
    rest.split_once(" MB").unwrap().0.parse().unwrap()
}

#[test]
fn ranks_with_a_limit_of_memory_may_be_lost_and_come_again_and_are_resumed() {
    let folder = with_text();
    let words = format!(
        "{GPT} --batch-size 64 --steps 6 --schedule constant --warmup-steps 0 --threads 1 --out OUT"
    );
    let plan = folder
        .together(&format!("{words} --memory 1GB --dry-run"))
        .run();
    plan.assert_well();
    let memory = format!("--memory {}MB", needed_mb(&plan) - 0.1);
    // The one that comes again plans for two ranks, and so may one that was alone.
    let job = folder.started(2, &format!("{words} {memory} --min-ranks 1 --restarts 1"));
    let ended = job.env("DDP_TEST_FAULT", "1:forward:3:kill").run();
    assert_eq!(ended.exit_code(), Some(0), "{ended}");
    assert!(
        ended.stderr.contains(" of 3 blocks: a rank needs "),
        "{ended}"
    );
    let more = words.replace("--steps 6", "--steps 8");
    let resumed = folder
        .together(&format!("{more} {memory} --resume auto"))
        .run();
    resumed.assert_well();
    assert!(
        resumed.stderr.contains(" of 3 blocks: a rank needs "),
        "{resumed}"
    );
    // A model that starts from this one's has its own way to save memory.
    let from = "--data book.txt --init-from OUT --steps 1 --threads 1 --out";
    let own = format!("{from} other --recompute block --recompute-blocks 1");
    folder.alone(&own).run().assert_well();
    let other = from.replace("OUT", "other");
    let free = folder.alone(&format!("{other} third --memory 1GB")).run();
    free.assert_well();
    assert!(free.stderr.contains("nothing is computed again"), "{free}");
}

#[test]
fn it_may_change_when_a_run_is_resumed_and_is_part_of_the_settings() {
    let folder = with_text();
    let run = |flags: &str| folder.alone(&format!("{GPT} {FLAGS} {flags}")).run();
    run("--steps 3 --recompute block").assert_well();
    let ended = run("--steps 6 --recompute attention --resume auto");
    ended.assert_well();
    assert!(!ended.stderr.contains("WARN"), "{ended}");
    assert!(model_bytes(&folder.out(), 6) == model_of(1, GPT));
    assert_eq!(folder.metrics_log().start()["config"]["recompute"], "block");
    let shown = folder
        .alone(&format!("{GPT} --recompute block --print-config"))
        .run();
    assert!(
        shown
            .stdout
            .contains("recompute = \"block\"  # --recompute"),
        "{shown}"
    );
    let cases = [
        (
            "--data glyphs --recompute block",
            "requires --model gpt or vit, got --model mlp",
        ),
        (
            "--data glyphs --model mlp,recompute=block",
            "mlp has no setting \"recompute\"",
        ),
        (
            "--data book.txt --model gpt --recompute all",
            "invalid value 'all' for '--recompute <WHAT>'",
        ),
        (
            "--data book.txt --model gpt --recompute block --recompute-blocks 5",
            "--recompute-blocks 5: expected at most the 4 of the model",
        ),
        (
            "--data book.txt --model gpt --recompute-blocks 2",
            "with --recompute attention or block",
        ),
        (
            "--data book.txt --model gpt --memory 1GB --recompute block",
            "help: give --recompute none, or leave --memory out",
        ),
        (
            "--data glyphs --memory 1GB --recompute-parts 1",
            "help: give --recompute-parts 0, or leave --memory out",
        ),
        ("--data book.txt --model gpt --memory 1GB0", "as in 40GiB"),
    ];
    all_at_once(cases, |(flags, part)| {
        let ended = folder.alone(&format!("{flags} --out other")).run();
        let text = ended.assert_fails(2);
        assert!(text.contains(part), "{flags}: {text}");
    });
}
