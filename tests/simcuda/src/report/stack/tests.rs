//! Stacks: what is shown of them, and that equal stacks are kept once.

use super::*;

#[inline(never)]
fn a_function_with_a_name() -> Stack {
    let stack = Stack::capture();
    // Not a tail call, so that it has a frame.
    std::hint::black_box(&stack);
    stack
}

#[test]
fn a_stack_names_the_functions_of_the_product_and_their_lines() {
    let stack = a_function_with_a_name();
    let text = stack.to_string();
    assert!(text.contains("a_function_with_a_name at "), "{text}");
    assert!(text.contains("stack/tests.rs:"), "{text}");
    assert!(
        !text.contains("core::ops") && !text.contains("Stack::capture"),
        "{text}"
    );
}

#[test]
fn one_path_is_kept_once() {
    let stacks: Vec<Stack> = (0..2).map(|_| a_function_with_a_name()).collect();
    assert!(Arc::ptr_eq(&stacks[0].path, &stacks[1].path));
}

#[test]
fn frames_of_the_runtime_the_bindings_and_the_simulator_are_dropped() {
    let own = OWN_FOLDER;
    let root = own.strip_suffix("tests/simcuda").unwrap();
    let printed = format!(
        "   0:     0x1 - ddp_simcuda::copy::cuMemcpyAsync\n                at {own}/src/copy.rs:9:5
           1:     0x2 - cuMemcpyAsync\n                at {own}/src/copy.rs:9:5
           2:     0x3 - cudarc::driver::x
           3:     0x4 - copy\n                at {root}kernels/src/cuda.rs:12:7
           4:     0x5 - main\n                at {root}examples/a.rs:3:1
           5:     0x6 - call_once\n                at /rustc/59807616e/library/core/src/ops/function.rs:250:5
           6:     0x7 - __libc_start_main_impl\n                at ./csu/../csu/libc-start.c:360:3
           7:     0x8 - main\n           8:     0x9 - _start\n           9:     0xa - <unknown>
          10:     0xb - <alloc::boxed::Box<F> as core::ops::FnOnce>::call_once\n"
    );
    assert_eq!(
        product_frames(&printed),
        ["copy at kernels/src/cuda.rs:12", "main at examples/a.rs:3"]
    );
}

#[test]
fn inlined_functions_and_others_have_one_name() {
    for (printed, name) in [
        ("begin", "begin"),
        (
            "ddp_comm::nccl::group::Nccl::begin::hd9e96bb63e36f746",
            "begin",
        ),
        (
            "copy_with<ddp_kernels::stream::Event, a::{closure_env#0}>",
            "copy_with",
        ),
        (
            "<fn() -> alloc::X<()> as core::ops::FnOnce<()>>::call_once",
            "call_once",
        ),
        (
            "ddp::step::Step::report::{{closure}}::{{closure}}::ha1b5d496218f3629",
            "report::{closure}",
        ),
        ("{closure#11}", "{closure}"),
        ("new<T>", "new"),
    ] {
        assert_eq!(name_of(printed), name);
    }
}

#[test]
fn a_long_stack_is_cut_in_the_middle_of_a_sentence() {
    fn deeper(levels: usize) -> Stack {
        let stack = if levels == 0 {
            Stack::capture()
        } else {
            deeper(levels - 1)
        };
        // Not a tail call, so that each level has a frame.
        std::hint::black_box(&stack);
        stack
    }
    let line = deeper(8).in_line();
    assert!(line.contains(" more)") && !line.contains('\n'), "{line}");
}
