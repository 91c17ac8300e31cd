//! What compiles, what does not, and what the log says.

use std::ffi::OsString;
use std::process::Command;
use std::sync::OnceLock;

use super::{Program, compile_now};

/// NVIDIA's library, for tests that nothing tells where it is.
pub(super) fn installed() -> Option<OsString> {
    static PATH: OnceLock<Option<OsString>> = OnceLock::new();
    let found = || {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../launch/check-kernels");
        let output = Command::new(script).arg("--nvrtc").output().ok()?;
        let path = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| path.trim().into())
    };
    PATH.get_or_init(found).clone()
}

fn log_of(source: &str) -> String {
    let program = Program {
        name: "wrong.cu".to_owned(),
        source: source.to_owned(),
        ..Program::default()
    };
    compile_now(&program, &["--gpu-architecture=sm_90"])
        .map(|_| ())
        .expect_err("it compiles")
}

#[test]
fn the_log_is_nvrtcs_own() {
    let log = log_of("\nextern \"C\" __global__ void k(float* x) {\n  x[0] = undeclared;\n}\n");
    assert!(
        log.contains("wrong.cu(3): error: identifier \"undeclared\" is undefined"),
        "{log}"
    );
    let log = log_of("\n#include <vector>\n");
    assert!(
        log.contains("wrong.cu(2)") && log.contains("vector"),
        "{log}"
    );
}

#[test]
fn options_headers_and_expressions_reach_nvrtc() {
    let program = |width: &str| Program {
        name: "made.cu".to_owned(),
        source: format!(
            "#include \"parts/common.cuh\"\n#if WIDTH != {width} || __CUDA_ARCH__ != 800\n#error wrong\n#endif\n\
             template <class T> __global__ void fill(T* x) {{ *x = T(LIMIT); }}\n"
        ),
        headers: vec![(
            "parts/common.cuh".to_owned(),
            "#define LIMIT 96\n".to_owned(),
        )],
        expressions: vec!["fill<float>".to_owned(), "fill<int>".to_owned()],
    };
    let options = ["-arch=sm_80", "--define-macro=WIDTH=4"];
    let compiled = compile_now(&program("4"), &options).expect("it compiles");
    for (expression, name) in [
        ("fill<float>", "_Z4fillIfEvPT_"),
        ("fill<int>", "_Z4fillIiEvPT_"),
    ] {
        assert_eq!(compiled.lowered[expression], name);
        assert!(compiled.ptx.contains(name));
    }
    assert!(compiled.ptx.contains(".target sm_80"));
    // Another program under the same name is not taken from the cache.
    let log = compile_now(&program("5"), &options).expect_err("WIDTH is 4");
    assert!(log.contains("made.cu(3)") && log.contains("wrong"), "{log}");
}
