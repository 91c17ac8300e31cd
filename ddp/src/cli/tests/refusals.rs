//! Flags that are refused, and what the message names.

use super::*;

/// A bare file was an unknown command.
#[test]
fn a_file_without_a_flag_is_data_whose_columns_could_be_labels() {
    let scratch = ddp_kernels::files::testing::Scratch::new();
    let file = |name: &str, text: &str| {
        let path = scratch.path().join(name).display().to_string();
        std::fs::write(&path, text).unwrap();
        path
    };
    let table = file("t.csv", "id,home town,price\n1,a,1.5\n2,b,2.5\n");
    let one = file("one.csv", "same,y\n1,2\n1,3\n");
    let text = file("a.txt", "to be");
    let all = "--labels COLUMN; these could be labels: id, 'home town', price";
    for (before, file, after) in [
        ("", &table, all),
        ("train ", &table, all),
        ("--epochs 3 ", &table, all),
        ("", &one, "--labels y"),
        ("", &text, ""),
    ] {
        let message = refusal(&format!("{before}{file}"));
        let advice = format!("{file}: expected a flag; help: write --data {file} {after}");
        assert_eq!(message, advice.trim_end());
    }
}

#[test]
fn invalid_flags_name_the_flag_the_value_and_the_choices() {
    for (line, parts) in [
        ("--lr -1", &["--lr -1:", "0 or more"][..]),
        ("--lr nan", &["--lr NaN:", "finite"]),
        ("--lr inf", &["--lr inf:", "finite"]),
        ("--lr 1e39", &["--lr", "below 3.4e38"]),
        ("--lr fast", &["'fast'", "--lr", "expected a number"]),
        (
            "--model linear",
            &["--model 'linear': no such value; help: write --model mlp --hidden none"],
        ),
        ("--min-lr 0.1", &["--min-lr 0.1:", "at most --lr 0.001"]),
        (
            "--min-lr 0.0001 --schedule constant",
            &["--min-lr 0.0001:", "--schedule cosine"],
        ),
        ("--batch-size 0", &["--batch-size 0:", "from 1 to"]),
        (
            "--batch-size 9007199254740993",
            &[
                "--batch-size 9007199254740993:",
                "from 1 to 9007199254740992",
            ],
        ),
        (
            "--steps 9007199254740993",
            &["--steps 9007199254740993:", "from 0 to 9007199254740992"],
        ),
        ("--batch-size -3", &["'-3'", "--batch-size", "whole number"]),
        ("--micro-batch 0", &["--micro-batch 0:", "from 1"]),
        (
            "--steps 10 --epochs 2",
            &["--steps 10:", "either", "--epochs 2"],
        ),
        ("--epochs 0", &["--epochs 0:", "--steps 0"]),
        (
            "--steps 10 --warmup-steps 11",
            &["--warmup-steps 11:", "at most the 10 steps"],
        ),
        ("--beta1 1", &["--beta1 1:", "less than 1"]),
        ("--beta2 -0.5", &["--beta2 -0.5:", "at least 0"]),
        ("--eps 2", &["--eps 2:"]),
        ("--momentum 0.9", &["--momentum 0.9:", "--optimizer sgd"]),
        (
            "--optimizer sgd --beta1 0.9",
            &["--beta1 0.9:", "--optimizer adamw"],
        ),
        (
            "--optimizer sgd --momentum 1",
            &["--momentum 1:", "less than 1"],
        ),
        (
            "--optimizer adam",
            &["--optimizer=adam: no such value; help: write --optimizer adamw --weight-decay 0"],
        ),
        ("--optimizer sdg", &["'sdg'", "--optimizer", "adamw, sgd"]),
        (
            "--missing median",
            &["--missing=median: no such value; help: write --missing mean"],
        ),
        (
            "--val-split 20",
            &["--val-split 20: expected a number, at least 0 and less than 1 (20% is 0.2)"],
        ),
        (
            "--val-split 20%",
            &["--val-split '20%': expected a number, as in 0.001 or 1e-3 (20% is 0.2)"],
        ),
        ("--dropout 1", &["--dropout 1:", "less than 1"]),
        ("--label-smoothing 1.5", &["--label-smoothing 1.5:"]),
        ("--grad-clip -1", &["--grad-clip -1:", "0 or more"]),
        ("--weight-decay -1", &["--weight-decay -1:"]),
        ("--class-weights 1,-2", &["--class-weights 1,-2:"]),
        ("--class-weights -1,2", &["--class-weights -1,2:"]),
        ("--class-weights 0,0", &["--class-weights 0,0:", "above 0"]),
        ("--hidden 32,0", &["--hidden 0:", "none for a linear model"]),
        ("--hidden 32,x", &["--hidden", "\"x\""]),
        (
            "--data synthetic:mnist",
            &["--data", "got \"synthetic:mnist\"", "glyphs"],
        ),
        (
            "--data glyphs,rows=0",
            &["--data", "rows: expected a whole number from 1"],
        ),
        ("--device gpu", &["'gpu'", "--device", "cuda"]),
        (
            "--device cuda:x",
            &["'cuda:x'", "--device", "a device number"],
        ),
        ("--device cpu --graph on", &["--graph on:", "--device cuda"]),
        (
            "--device cpu --data-on-device on",
            &["--data-on-device on:", "--device cuda"],
        ),
        (
            "--device cpu --devices-per-rank 2",
            &["--devices-per-rank 2:", "--device cuda"],
        ),
        (
            "--device cuda:1 --devices-per-rank 2",
            &[
                "--device cuda:1:",
                "--device cuda with --devices-per-rank 2",
            ],
        ),
        (
            "--graph on --devices-per-rank 2",
            &["--graph on:", "--devices-per-rank 1"],
        ),
        (
            "--devices-per-rank 0",
            &["--devices-per-rank 0:", "from 1 to 64"],
        ),
        (
            "--devices-per-rank 65",
            &["--devices-per-rank 65:", "from 1 to 64"],
        ),
        (
            "--devices-per-rank two",
            &["'two'", "--devices-per-rank", "whole number, 1 or more"],
        ),
        (
            "--share-gpus=maybe",
            &["'maybe'", "--share-gpus", "true, false"],
        ),
        ("--dtype f8", &["'f8'", "--dtype", "f32, tf32, bf16"]),
        (
            "--data-on-device never",
            &["'never'", "--data-on-device", "auto, on, off"],
        ),
        ("--zero 3", &["--zero 3:", "from 0 to 2"]),
        ("--zero -1", &["'-1'", "--zero", "whole number"]),
        ("--graph maybe", &["'maybe'", "--graph", "auto, on, off"]),
        ("--threads 0", &["--threads 0:", "from 1 to 1024"]),
        ("--seed -1", &["'-1'", "--seed"]),
        (
            "--seed 9223372036854775808",
            &["--seed 9223372036854775808:"],
        ),
        ("--log-every 0", &["--log-every 0:", "from 1"]),
        ("--bucket-mb 0", &["--bucket-mb 0:"]),
        ("--timeout-s 0", &["--timeout-s 0:"]),
        ("--timeout-s inf", &["--timeout-s inf:"]),
        ("--progress maybe", &["'maybe'", "auto, always, never"]),
        ("--freeze 0,,1", &["--freeze an empty name:"]),
        (
            "--learning-rate 1",
            &["--learning-rate: ", "write --lr RATE"],
        ),
        ("--batch_size 8", &["--batch_size: ", "write --batch-size"]),
        ("train --gpus=2", &["--gpus: ", "ddp-train --ranks auto"]),
        ("--checkpoint-dir a", &["--checkpoint-dir: ", "--out DIR"]),
        ("--accumulate 4", &["--accumulate: ", "--micro-batch ROWS"]),
        ("--num-epochs 3", &["--num-epochs: ", "--epochs N"]),
        ("test", &["test: no such command", "write ddp-train eval"]),
        ("fit --lr 1", &["fit: no such command", "ddp-train --data"]),
        ("Fine-Tune", &["Fine-Tune: no such", "--init-from FOLDER"]),
        ("--lora-r 4", &["--lora-r: ", "--lora rank=16"]),
        ("--qlora", &["--qlora: ", "not quantized", "--lora rank=16"]),
        (
            "--task dpo",
            &[
                "--task=dpo: no such value",
                "with TRL",
                "--lora from=FOLDER",
            ],
        ),
        ("--dpo", &["--dpo: no such flag", "with TRL"]),
        ("--peft true", &["--peft: ", "--lora from=FOLDER"]),
        (
            "--assistant_only_loss",
            &["--assistant_only_loss: ", "--loss-on all"],
        ),
        (
            "--load_in_4bit",
            &["--load_in_4bit: ", "not quantized", "--recompute block"],
        ),
        (
            "--chat-template a",
            &["--chat-template: ", "--tokenizer FOLDER"],
        ),
        ("--bs 3", &["--bs: ", "--batch-size ROWS"]),
        ("--drop-last yes", &["'yes'", "--drop-last", "true, false"]),
        (
            "--hidden -5",
            &["'-5'", "whole numbers separated by commas"],
        ),
        ("--nesterov", &["--nesterov true: expected --optimizer sgd"]),
        (
            "--optimizer sgd --momentum 0 --nesterov",
            &["--nesterov true: expected --optimizer sgd with a --momentum above 0"],
        ),
        (
            "--optimizer muon --momentum 0",
            &["--momentum 0: expected a number above 0"],
        ),
        (
            "--optimizer muon --lr 0",
            &["--lr 0: expected a number above 0"],
        ),
        ("--adam-lr 1", &["--adam-lr 1: expected --optimizer muon"]),
        (
            "--optimizer muon --nesterov",
            &["--nesterov true: expected --optimizer sgd"],
        ),
        (
            "--batch-tokens 100",
            &[
                "--batch-tokens 100: expected a model of tokens",
                "--batch-size ROWS",
            ],
        ),
        (
            "--model gpt --batch-tokens 300",
            &[
                "a multiple of the model's context, 128 tokens",
                "give 256 or 384",
            ],
        ),
        ("--model gpt --batch-tokens 3", &["give 128"]),
        (
            "--model gpt --batch-tokens 256 --batch-size 2",
            &[
                "either --batch-size or --batch-tokens",
                "leave --batch-size 2 out",
            ],
        ),
        (
            "--group 0.*",
            &["--group 0.*: expected an lr or a weight-decay"],
        ),
        (
            "--group :lr=1",
            &["expected a pattern of parameters' names"],
        ),
        (
            "--group 0.*:rate=1",
            &["expected lr=NUMBER or weight-decay=NUMBER", "rate=1"],
        ),
        ("--group 0.*:lr=1:lr=2", &["each once", "got \"lr=2\""]),
        ("--group a[:lr=1", &["the group a["]),
        (
            "--group 0.*:lr=-1",
            &["--group 0.*:lr=-1: expected a finite number, 0 or more"],
        ),
        (
            "--lr 0 --group 0.*:lr=1",
            &["--group 0.*: expected an --lr above 0"],
        ),
        (
            "--model gpt,width=9999999",
            &["--width 9999999: expected a whole number from 1 to 4194304"],
        ),
        ("--decay biases", &["'biases'", "--decay", "matrices, all"]),
        ("report", &["<DIR>"]),
        ("bench", &["mlp", "addmm", "allreduce"]),
        ("bench mlp --layers 3", &["'3'", "--layers", "two widths"]),
        ("bench mlp --dtype f16", &["'f16'", "f32, tf32, bf16"]),
        ("bench mlp --zero 3", &["--zero 3:", "0 to 2"]),
        ("bench mlp --batch 0", &["'0'", "--batch", "from 1"]),
        ("bench addmm --shapes 2x3", &["2x3"]),
        ("bench addmm --shapes 2x0x3", &["--shapes", "2x0x3"]),
        (
            "bench addmm --shapes none",
            &["'none'", "--shapes", "at least one"],
        ),
        ("bench addmm --shapes 2x2x2 --k 3", &["--shapes", "--k"]),
        ("bench addmm --dtype i64", &["'i64'", "f32, tf32, bf16"]),
        (
            "bench allreduce --mb -1",
            &["'-1'", "--mb", "from 0.000004"],
        ),
        ("bench allreduce --sweep 1", &["--sweep", "0.001:64"]),
        ("bench allreduce --sweep 2:1", &["--sweep", "0.001:64"]),
        (
            "bench allreduce --sweep 0:1",
            &["'0:1'", "--sweep", "0.001:64"],
        ),
        ("bench allreduce --sweep 1:2 --mb 1", &["--sweep", "--mb"]),
        (
            "bench allreduce --operation reduce",
            &[
                "'reduce'",
                "all_reduce, reduce_scatter, all_gather, broadcast",
            ],
        ),
        (
            "bench allreduce --rounds 0",
            &["'0'", "--rounds", "from 1 to 1000"],
        ),
        (
            "bench allreduce --seconds 0",
            &["'0'", "--seconds", "from 0.01"],
        ),
    ] {
        let message = refusal(line);
        parts
            .iter()
            .for_each(|part| assert!(message.contains(part), "{line}\n{message}\nlacks {part:?}"));
        assert!(!message.starts_with("error: "), "{message}");
    }
}
