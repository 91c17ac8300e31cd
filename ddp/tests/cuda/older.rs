//! GPUs that are too old, alone or beside others, and those below 8.0, whose kernels are compiled
//! without newer instructions. SIMCUDA_CAPABILITY makes simulated GPUs old.

use crate::simulated_gpus_of_jobs;
use crate::support::job::{Ended, Folder};
use crate::support::metrics_log::model_bytes;

const WORDS: &str = "--data glyphs,rows=261,held-out=64 --hidden 16 --batch-size 32 --epochs 1 \
                     --log-every 3 --out OUT --threads 1";
const STEPS: u64 = 9;

fn run(folder: &Folder, ranks: usize, capability: &str, flags: &str) -> Ended {
    let words = format!("{WORDS} {flags}");
    let job = match ranks {
        1 => folder.alone(&words),
        _ => folder.ranks(ranks, &words),
    };
    job.on_gpus().env("SIMCUDA_CAPABILITY", capability).run()
}

#[test]
fn gpus_below_7_5_are_refused_by_name_and_auto_says_how_to_leave_them_out() {
    let Some(_gpu) = simulated_gpus_of_jobs(2) else {
        return;
    };
    let name = &ddp_kernels::device::discover().gpus[0].name;
    let why = format!("cuda:0 ({name}) has compute capability 7.0, and 7.5 is needed");
    let help = "(beside a newer GPU, set CUDA_VISIBLE_DEVICES to leave it out)";
    for (ranks, capability) in [(1, "7.0"), (1, "7.0,9.0"), (2, "7.0,9.0")] {
        let folder = Folder::new("old");
        let refused = run(&folder, ranks, capability, "--device cuda");
        let cause = refused.assert_fails(2);
        assert!(cause.contains(&format!("{why} {help}")), "{refused}");

        let ended = run(&folder, ranks, capability, "--device auto");
        ended.assert_well();
        let said = ended.stderr.contains(&format!("{why} {help}"));
        let log = folder.metrics_log();
        let device = log.start()["devices"][0].as_str().unwrap();
        assert!(said && device.starts_with("cpu "), "{device}: {ended}");
    }
    run(&Folder::new("old"), 1, "7.0,9.0", "--device cuda:1").assert_well();
    let folder = Folder::new("old");
    let doctor = folder.alone("doctor --quick").on_gpus();
    let seen = doctor.env("SIMCUDA_CAPABILITY", "7.0,9.0").run();
    assert!(
        seen.stdout.contains(&why) && !seen.stdout.contains("install the NVRTC"),
        "{seen}"
    );
}

#[test]
fn gpus_of_7_5_make_the_model_of_newer_ones_and_have_no_bf16() {
    let Some(_gpu) = simulated_gpus_of_jobs(2) else {
        return;
    };
    // Reducing in bf16 needs no bf16 matmul, so it is allowed.
    let model = |capability: &str, flags: &str| {
        let (folder, flags) = (Folder::new("turing"), format!("--device cuda {flags}"));
        run(&folder, 2, capability, &flags).assert_well();
        (
            folder.metrics_log().losses(),
            model_bytes(&folder.out(), STEPS),
        )
    };
    let flags = "--reduce-dtype bf16 --zero 1 --grad-clip 1";
    assert!(model("7.5", flags) == model("9.0", flags));
    let refused = run(
        &Folder::new("turing"),
        1,
        "7.5",
        "--device cuda --dtype bf16",
    );
    let cause = refused.assert_fails(2);
    assert!(
        cause.contains("bf16 needs compute capability 8.0"),
        "{refused}"
    );
}
