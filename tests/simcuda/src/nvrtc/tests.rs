//! What compiles, what does not, and what the log says.

use super::rewrite::rewrite;
use super::{Program, compile_now};

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
fn errors_stand_at_the_line_of_the_source() {
    let log = log_of(
        "// one\n#define TWO 2\n\nextern \"C\" __global__ void k(float* x) {\n  x[0] = undeclared;\n}\n",
    );
    assert!(
        log.contains("wrong.cu:5:") && log.contains("undeclared"),
        "{log}"
    );
    let log = log_of(
        "extern \"C\" __global__ void k() {\n  extern __shared__\n    float s[];\n  s[0] = missing;\n}\n",
    );
    assert!(log.contains("wrong.cu:4:"), "{log}");
    let log = log_of("__global__ void k() {\n  __shared__ int s = 3;\n}\n");
    assert!(
        log.contains("wrong.cu:2:") && log.contains("initializer is not allowed"),
        "{log}"
    );
    let log = log_of(
        "extern \"C\" __global__ void k() {}\nextern \"C\" __global__ int wrong() { return 1; }\n",
    );
    assert!(log.contains("wrong.cu:2:"), "{log}");
}

#[test]
fn headers_of_the_host_are_not_there() {
    for header in ["vector", "stdio.h", "cstdint", "immintrin.h"] {
        let log = log_of(&format!("\n#include <{header}>\n"));
        assert!(log.contains(header) && log.contains("wrong.cu:2:"), "{log}");
    }
}

#[test]
fn errors_in_named_headers_name_them() {
    let headers = vec![(
        "parts/common.cuh".to_owned(),
        "\n\nint broken = ;\n".to_owned(),
    )];
    let source = "#include \"parts/common.cuh\"\n".to_owned();
    let program = Program {
        name: "k.cu".to_owned(),
        source,
        headers,
        ..Program::default()
    };
    let log = compile_now(&program, &[])
        .map(|_| ())
        .expect_err("it compiles");
    assert!(
        log.contains("parts/common.cuh:3:") && !log.contains("making-"),
        "{log}"
    );
}

#[test]
fn macros_reach_the_source() {
    let source = "#if WIDTH != 4 || defined(GONE)\n#error wrong\n#endif\n#if __CUDA_ARCH__ != 800\n#error device\n#endif\n"
        .to_owned();
    let program = Program {
        name: "k.cu".to_owned(),
        source,
        ..Program::default()
    };
    compile_now(
        &program,
        &["-arch=sm_80", "--define-macro=WIDTH=4", "-DGONE", "-UGONE"],
    )
    .map(|_| ())
    .expect("it compiles");
    let log = compile_now(&program, &["-arch=sm_80", "-DWIDTH=5"])
        .map(|_| ())
        .expect_err("it compiles");
    assert!(log.contains("k.cu:2:"), "{log}");
}

#[test]
fn a_header_may_not_leave_its_folder() {
    let headers = vec![("../outside.cuh".to_owned(), String::new())];
    let program = Program {
        name: "k.cu".to_owned(),
        headers,
        ..Program::default()
    };
    let log = compile_now(&program, &[])
        .map(|_| ())
        .expect_err("it compiles");
    assert!(log.contains("../outside.cuh"), "{log}");
}

#[test]
fn ptx_without_a_model_does_not_compile() {
    for (instruction, told) in [
        ("cvt.rz.bf16.f32 %0, %1;", "cvt_rz_bf16_f32"),
        ("cvt.rn.bf16.f32 %1, %0;", "only one PTX instruction"),
    ] {
        let log = log_of(&format!(
            "__global__ void k(unsigned short* h, float x) {{\n  asm(\"{instruction}\" : \"=h\"(*h) : \"f\"(x));\n}}\n"
        ));
        assert!(log.contains("wrong.cu:2:") && log.contains(told), "{log}");
    }
}

#[test]
fn global_variables_of_the_device_do_not_compile() {
    for variable in [
        "__device__ int total;",
        "static __device__ float totals[8];",
        "__device__ int total = 1;",
        "__managed__ int total;",
        "__device__ __align__(8) int total;",
    ] {
        let log = log_of(&format!(
            "__device__ int one() {{ return 1; }}\n{variable}\n__global__ void k(int* x) {{ *x = one(); }}\n"
        ));
        let told = "global variables of the device are not simulated";
        let is_told = log.contains("wrong.cu:2:") && log.contains(told);
        assert!(is_told, "{variable} {log}");
    }
}

#[test]
fn parameters_that_may_be_read_through_the_cache_are_marked() {
    let source = "extern \"C\" __global__ void k(const float* __restrict__ yes, float* __restrict__ b, \
                  float const* const __restrict__ yes_too, const float* d, Pair<const int*, int> e, \
                  const float** __restrict__ f) {}";
    let text = rewrite("k.cu", source, &[]).expect("it is understood").text;
    assert!(text.contains("\"\", 5ull);"), "{text}");
}
