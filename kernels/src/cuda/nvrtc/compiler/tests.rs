//! The compiler alone, where there is one (NVIDIA's or the simulator's): no GPU is needed. Other
//! tests use made-up files.

use super::*;
use crate::device;

/// The compiler, or the line that says why the test says nothing.
fn compiler() -> Option<&'static Compiler> {
    get()
        .inspect_err(|why| ddp_testing::skip(&format!("no CUDA device nor NVRTC ({why})")))
        .ok()
}

fn part(found: Option<&str>, advice: Option<&str>) -> device::CudaLibrary {
    let advice = advice.map(str::to_string);
    let file = |path: &str| device::Candidate {
        path: path.into(),
        version: None,
        skipped: advice.clone(),
    };
    device::CudaLibrary {
        what: "NVRTC",
        found: found.map(Into::into),
        version: None,
        candidates: found.map(file).into_iter().collect(),
        advice,
    }
}

#[test]
fn a_source_compiles_with_the_header_and_each_time_to_the_same_bytes() {
    let Some(compiler) = compiler() else { return };
    let text =
        "#include \"common.cuh\"\nextern \"C\" __global__ void one(float* x) { x[0] = 1.0f; }\n";
    let compile = || compiler.compile("one.cu", text, (90, true)).unwrap();
    let image = compile();
    // Machine code, or for a simulated GPU PTX.
    assert!(image.windows(3).any(|it| it == b"one"));
    assert!(compile() == image);
}

#[test]
fn an_error_in_a_source_is_told_with_its_line() {
    let Some(compiler) = compiler() else { return };
    let text = "#include \"common.cuh\"\n\nextern \"C\" __global__ void one(float* x) { x[0] = unheard_of; }\n";
    let log = compiler.compile("broken.cu", text, (90, true)).unwrap_err();
    // NVRTC writes broken.cu(3), GCC broken.cu:3.
    assert!(
        log.contains("broken.cu(3)") || log.contains("broken.cu:3"),
        "{log}"
    );
    assert!(
        log.contains("unheard_of") && log.starts_with(&compiler.to_string()),
        "{log}"
    );
}

#[test]
fn a_gpu_that_the_compiler_does_not_know_is_refused() {
    let Some(compiler) = compiler() else { return };
    assert_eq!(compiler.target((9, 0)), Ok((90, true)));
    assert_eq!(compiler.target((9, 9)), Ok((90, false)));
    for unknown in [(1, 0), (99, 0)] {
        let refusal = compiler.target(unknown).unwrap_err();
        assert!(
            refusal.contains("and this GPU is sm_") && refusal.contains("; help: install"),
            "{refusal}"
        );
    }
}

#[test]
fn a_missing_or_broken_library_is_named_with_help() {
    let open = |part: &device::CudaLibrary| {
        Library::first(part, &["libddp-is-not-there.so.1"], |_| Ok(())).unwrap_err()
    };
    assert_eq!(
        open(&part(None, Some("install it"))),
        "NVRTC was not found; help: install it"
    );
    let broken = open(&part(
        Some("/x/libnvrtc.so.13"),
        Some("broken: it is too short. Reinstall it"),
    ));
    assert_eq!(
        broken,
        "NVRTC cannot be used: broken: it is too short. Reinstall it"
    );
    let gone = open(&part(Some("/x/libnvrtc.so.13"), None));
    assert!(
        gone.starts_with("NVRTC cannot be loaded: ") && gone.contains("/x/libnvrtc.so.13"),
        "{gone}"
    );
    assert!(gone.contains("LD_LIBRARY_PATH"), "{gone}");
}

#[test]
#[cfg(target_env = "gnu")]
fn a_library_that_lacks_functions_is_refused_before_any_is_called() {
    let load = |library| NvrtcFunctions::load(library, HELP);
    let refusal = Library::first(&part(Some("libc.so.6"), None), &[], load)
        .err()
        .unwrap();
    assert!(
        refusal.starts_with("NVRTC lacks nvrtcVersion, nvrtcGetErrorString, "),
        "{refusal}"
    );
    assert!(
        refusal.contains("nvrtcGetCUBIN; help: install NVRTC"),
        "{refusal}"
    );
}

#[test]
#[cfg(target_env = "gnu")]
fn a_library_that_lacks_functions_makes_room_for_the_next() {
    library::functions! {
        struct OfMath { fn cos(f64) -> f64; }
    }
    let mut part = part(Some("libc.so.6"), None);
    part.candidates.push(device::Candidate {
        path: "libm.so.6".into(),
        ..part.candidates[0].clone()
    });
    let math = Library::first(&part, &[], |library| OfMath::load(library, "")).unwrap();
    // SAFETY: `cos` of the C library takes any double.
    assert_eq!(unsafe { (math.cos)(0.0) }, 1.0);
    let refused = Library::refused();
    assert!(
        refused.iter().any(|(_, why)| why == "NVRTC lacks cos"),
        "{refused:?}"
    );
}

#[test]
fn only_a_source_that_asks_is_compiled_for_one_architecture_alone() {
    let first = |target, text: &str| options(target, text).swap_remove(0);
    let asks = "#ifdef __CUDA_ARCH_FEAT_SM90_ALL";
    assert_eq!(
        first((90, true), "__global__ …"),
        "--gpu-architecture=sm_90"
    );
    assert_eq!(first((90, true), asks), "--gpu-architecture=sm_90a");
    assert_eq!(first((80, true), asks), "--gpu-architecture=sm_80");
    // Such code would not run on a later GPU of the same generation.
    assert_eq!(first((90, false), asks), "--gpu-architecture=sm_90");
}
