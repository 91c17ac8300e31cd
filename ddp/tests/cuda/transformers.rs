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
        for recompute in ["attention", "block"] {
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
