//! The second opinion: PTX that does what the library of the host does, and PTX with a mistake.

use std::sync::Arc;

use super::{Ground, Library, shot};
use crate::nvrtc::{self, Program};

const SOURCE: &str = r#"
extern "C" __global__ void twice(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2.0f;
}
"#;

/// Of the same kernel, by hand.
const PTX: &str = "
.version 9.0
.target sm_90
.address_size 64
.visible .entry twice(
  .param .u64 twice_param_0,
  .param .u32 twice_param_1
)
{
  .reg .pred %p<2>;
  .reg .f32 %f<3>;
  .reg .b32 %r<6>;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [twice_param_0];
  ld.param.u32 %r1, [twice_param_1];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.s32 %p1, %r5, %r1;
  @%p1 bra END;
  mul.wide.s32 %rd3, %r5, 4;
  add.s64 %rd4, %rd1, %rd3;
  ld.global.f32 %f1, [%rd4];
  mul.rn.f32 %f2, %f1, 0f40000000;
  st.global.f32 [%rd4], %f2;
END:
  ret;
}
";

/// What a launch says when `text` of the PTX is `other`.
fn launched(text: &str, other: &str) -> Result<(), String> {
    assert_eq!(PTX.matches(text).count(), 1, "{text} occurs once");
    let program = Program {
        name: "kernel.cu".to_owned(),
        source: SOURCE.to_owned(),
        ..Program::default()
    };
    let options = ["--gpu-architecture=sm_90", "--fmad=false", "--std=c++17"];
    let compiled = nvrtc::compile_now(&program, &options).unwrap();
    let image = nvrtc::joined(compiled.image, &PTX.replace(text, other));
    // SAFETY: the image is whole: it says how much text follows it.
    let library = Arc::new(unsafe { Library::load(image.as_ptr(), 90) }.unwrap());
    let mut ground = Ground::default();
    let values: Vec<f32> = (0..100).map(|at| at as f32).chain([f32::NAN]).collect();
    let x = ground.upload(&values);
    let result = shot(&library, "twice", 2, 64, &[x, 101]).run(&ground);
    result.map(drop).map_err(|failure| failure.message)
}

#[test]
fn ptx_that_does_the_same_agrees_and_every_mistake_is_found() {
    assert_eq!(launched("mul.rn.f32", "mul.rn.f32"), Ok(()));
    // The compiler may leave out a store of what is there: 2 · 0.
    let skips_zero =
        "  setp.eq.f32 %p1, %f2, 0f00000000;\n  @%p1 bra END;\n  st.global.f32 [%rd4], %f2;\n";
    assert_eq!(
        launched("  st.global.f32 [%rd4], %f2;\n", skips_zero),
        Ok(())
    );
    for (text, other, found) in [
        (
            "0f40000000",
            "0f40400000",
            "stretches of up to 64 bytes differ",
        ),
        ("  st.global.f32 [%rd4], %f2;\n", "", "it does not write"),
        ("setp.ge", "setp.gt", "OutOfBounds"),
        (
            "%r3, %r4;",
            "%r4, %r4;",
            "stretches of up to 64 bytes differ",
        ),
        (
            "st.global.f32 [%rd4]",
            "st.global.f32 [%rd4+2]",
            "Misaligned",
        ),
        ("ld.global.f32", "ld.global.nc.f32", "ReadOnly"),
        (
            "mul.rn.f32",
            "mul.rz.f32",
            "cannot be executed: line 25 of the PTX: mul.rz.f32",
        ),
        (".entry twice", ".entry thrice", "it has no such kernel"),
        (
            ".param .u32 twice_param_1",
            ".param .u64 twice_param_1",
            "parameters have [8, 8]",
        ),
    ] {
        let message = launched(text, other).expect_err(other);
        assert!(message.contains(found), "{other}: {message}");
    }
}
