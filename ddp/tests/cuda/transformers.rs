//! Transformers on GPUs, through the program: a captured step has the bits of an eager one, also
//! where backward computes activations again, and losses are those of the CPU up to rounding.

use crate::gpu;
use crate::support::job::Folder;
use crate::support::record::model_bytes;

const VIT: &str = "--model vit,layers=1,heads=2,width=8,patch=14,pool=class \
                   --data glyphs,rows=8,held-out=0 --batch-size 4 --epochs 2 --log-every 1 \
                   --dropout 0.1 --micro-batch 3 --threads 1 --out OUT";
/// 2 steps in each epoch.
const STEPS: u64 = 4;

/// The losses of a run, and the bytes of its model.
fn run(words: &str) -> (Vec<f64>, Vec<u8>) {
    let folder = Folder::new("transformers");
    let ended = folder.alone(words).on_gpus().run();
    ended.assert_well();
    (folder.record().losses(), model_bytes(&folder.out(), STEPS))
}

#[test]
fn patches_are_learned_as_on_the_cpu_captured_and_eager() {
    let Some(_gpu) = gpu() else { return };
    let (cpu, _) = run(&format!("{VIT} --device cpu"));
    for (dtype, apart_max) in [("f32", 1e-4), ("bf16", 0.05)] {
        let [captured, eager] = ["on", "off"].map(|graph| {
            run(&format!(
                "{VIT} --device cuda --dtype {dtype} --graph {graph}"
            ))
        });
        assert!(captured == eager, "{dtype}");
        for recompute in ddp_slice::from(dtype, ["attention", "block"], 1) {
            let flags = format!("--device cuda --dtype {dtype} --recompute {recompute}");
            assert!(run(&format!("{VIT} {flags}")) == captured, "{flags}");
        }
        for (gpu, cpu) in captured.0.iter().zip(&cpu) {
            let apart = (gpu - cpu).abs();
            assert!(
                apart < apart_max,
                "{dtype}: {gpu} on the GPU, {cpu} on the CPU"
            );
        }
    }
}

#[test]
fn a_sample_is_what_generate_makes_of_the_checkpoint_also_of_split_layers_in_bf16() {
    let Some(_gpu) = gpu().filter(|_| ddp_kernels::Device::usable().len() > 2) else {
        return;
    };
    let folder = Folder::new("sample");
    std::fs::write(folder.path().join("t.txt"), "To be. ".repeat(40)).unwrap();
    let words = "--model gpt,layers=2,heads=2,width=8,context=8,tied=false --data t.txt --steps 2 \
                 --batch-size 4 --dtype bf16 --device cuda --devices-per-rank 2 --threads 1 \
                 --seed 3 --sample To --out OUT";
    folder.alone(words).on_gpus().run().assert_well();
    let words = "generate --checkpoint OUT --prompt To --max-tokens 64 --seed 3";
    let made = folder.alone(words).run();
    let text = made.stdout.strip_suffix('\n').unwrap();
    assert_eq!(folder.record().all("sample")[0]["text"], text);
}
