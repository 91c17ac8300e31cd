//! What is not simulated is refused by name, with its line.

use ddp_ptx::{Module, Refusal};

use crate::machine::kernel;

fn refusal(body: &str) -> Refusal {
    let text = kernel("", body);
    match Module::parse(&text).map(|module| module.kernel("k")) {
        Err(refusal) | Ok(Some(Err(refusal))) => refusal,
        other => panic!("{body} is accepted: {other:?}"),
    }
}

#[test]
fn unknown_instructions_types_and_modifiers_are_named() {
    for (instruction, named) in [
        (
            "wgmma.fence.aligned;",
            "wgmma.fence.aligned is not simulated",
        ),
        ("fence.proxy.alias;", "fence.proxy.alias is not simulated"),
        ("add.rz.f32 %r1, %r2, %r3;", "add.rz.f32 is not simulated"),
        ("add.sat.s32 %r1, %r2, %r3;", "add.sat.s32 is not simulated"),
        ("add.f16x2 %r1, %r2, %r3;", "add.f16x2 is not simulated"),
        ("ex2.f32 %r1, %r2;", "ex2.f32 is not simulated"),
        ("cvt.f32.s32 %r1, %r2;", "cvt.f32.s32 is not simulated"),
        (
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r2}, {%r3}, {%r4};",
            "not simulated",
        ),
        ("mov.u32 %r1, %clock;", "%clock is not simulated"),
        ("mov.u32 %r1, %rd1;", "%rd1 has 64 bits, expected 32"),
        ("mov.u32 %r1, %unknown;", "%unknown is not simulated"),
        ("ld.const.u32 %r1, [%rd1];", "ld.const.u32 is not simulated"),
        (
            "ld.global.u64 %r1, [%rd1];",
            "ld.global.u64 is not simulated",
        ),
        ("bra NOWHERE;", "no label NOWHERE"),
        ("call f, ();", "call is not simulated"),
        ("add.s32 %r1, %r2;", "2 operands, expected 3"),
        (
            "cp.async.cg.shared.global [%r1], [%rd1], 8;",
            "a copy of 8 bytes",
        ),
    ] {
        let refusal = refusal(&format!("\t{instruction}\n"));
        assert!(refusal.message.contains(named), "{instruction}: {refusal}");
        let line = kernel("", &format!("\t{instruction}\n"))
            .lines()
            .position(|line| line.contains(instruction));
        assert_eq!(
            Some(refusal.line),
            line.map(|line| line as u32 + 1),
            "{instruction}"
        );
    }
}

#[test]
fn products_of_a_warpgroup_that_are_not_simulated_are_named() {
    let d = "{%r1, %r2, %r3, %r4}";
    let a = "{%r5, %r6, %r7, %r8}";
    for (types, operands, named) in [
        (
            "m64n8k16.f16.f16.f16",
            format!("{d}, %rd1, %rd2, 1, 1, 1, 0, 0"),
            "these types",
        ),
        (
            "m64n8k8.f32.tf32.tf32",
            format!("{d}, %rd1, %rd2, 1, 1, 1"),
            "these types",
        ),
        (
            "m64n12k16.f32.bf16.bf16",
            format!("{d}, %rd1, %rd2, 1, 1, 1, 0, 0"),
            "shape m64n12k16 is not simulated",
        ),
        (
            "m64n16k16.f32.bf16.bf16",
            format!("{d}, %rd1, %rd2, 1, 1, 1, 0, 0"),
            "an accumulator of 4 registers, expected 8",
        ),
        (
            "m64n8k16.f32.bf16.bf16",
            format!("{d}, {a}, %rd2, 1, 1, 1, 0, 0"),
            "8 operands of these kinds",
        ),
        (
            "m64n8k16.f32.bf16.bf16",
            format!("{d}, {a}, %rd2, 1, 1, 2, 0"),
            "expected 1 or -1",
        ),
        (
            "m64n8k16.f32.bf16.bf16",
            format!("{d}, {a}, %rd2, 1, 1, 1, 2"),
            "expected 0 or 1",
        ),
        (
            "m64n8k16.f32.bf16.bf16",
            format!("{d}, {a}, %rd2, 2, 1, 1, 0"),
            "expected a predicate, 0 or 1",
        ),
    ] {
        let instruction = format!("wgmma.mma_async.sync.aligned.{types} {operands};");
        let refusal = refusal(&format!("\t{instruction}\n"));
        assert!(refusal.message.contains(named), "{instruction}: {refusal}");
    }
}

#[test]
fn modules_with_what_is_not_simulated_are_refused() {
    for (text, named) in [
        (".func f() { ret; }", ".func"),
        (".visible .entry k() { ret;", "expected }"),
        (".visible .entry k() { .reg .b128 %q<2>; ret; }", ""),
    ] {
        let found = Module::parse(text);
        let refusal = match found {
            Err(refusal) => refusal,
            Ok(module) => module
                .kernel("k")
                .expect("it is there")
                .expect_err("it is refused"),
        };
        assert!(refusal.message.contains(named), "{refusal}");
    }
    assert!(Module::parse("").is_ok_and(|module| module.kernel("k").is_none()));
}
