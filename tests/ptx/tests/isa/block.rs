//! Blocks: barriers, shared and local memory, copies, special registers.

use ddp_ptx::{Launch, Module, Shadows};

use crate::machine::{self, bytes_of, kernel, launch, per_thread, threads, words_of};

const TILE: &str = "\t.shared .align 16 .b8 tile[1024];\n";

/// %r3 is the thread's word of the tile, %r4 that of the thread opposite.
const PLACES: &str = "\tmov.u32 %r1, tile;\n\tshl.b32 %r2, %r0, 2;\n\tadd.u32 %r3, %r1, %r2;\n\tmov.u32 %r4, %ntid.x;\n\tsub.u32 %r4, %r4, 1;\n\
                      \tsub.u32 %r4, %r4, %r0;\n\tshl.b32 %r4, %r4, 2;\n\tadd.u32 %r4, %r1, %r4;\n";

#[test]
fn threads_exchange_words_over_a_barrier() {
    let body = format!(
        "{PLACES}\tst.shared.u32 [%r3], %r0;\n\tbar.sync 0;\n\tld.shared.u32 %r9, [%r4];\n\tst.global.u32 [%rd1], %r9;\n"
    );
    let found =
        per_thread(100, TILE, &body, &[0; 100]).unwrap_or_else(|finding| panic!("{finding}"));
    assert_eq!(found, (0..100).rev().collect::<Vec<u32>>());
}

#[test]
fn a_barrier_reduces_what_all_threads_say() {
    let of = |threads: u32, reduction: &str| {
        let body =
            format!("\tsetp.ne.u32 %p1, %r0, 70;\n{reduction}\tst.global.u32 [%rd1], %r9;\n");
        per_thread(threads, "", &body, &vec![9; threads as usize])
            .unwrap_or_else(|finding| panic!("{finding}"))[0]
    };
    let and = "\tbar.red.and.pred %p2, 0, %p1;\n\tselp.u32 %r9, 1, 0, %p2;\n";
    let or = "\tbar.red.or.pred %p2, 0, !%p1;\n\tselp.u32 %r9, 1, 0, %p2;\n";
    assert_eq!([of(70, and), of(71, and)], [1, 0]);
    assert_eq!([of(70, or), of(71, or)], [0, 1]);
    assert_eq!(of(100, "\tbar.red.popc.u32 %r9, 0, %p1;\n"), 99);
}

#[test]
fn named_barriers_are_for_those_that_come() {
    // Warps 0 and 1 meet at barrier 1, warps 2 and 3 at barrier 2; then all.
    let body = format!(
        "{PLACES}\tst.shared.u32 [%r3], %r0;\n\tshr.u32 %r5, %r0, 6;\n\tadd.u32 %r5, %r5, 1;\n\tbar.sync %r5, 64;\n\
         \txor.b32 %r6, %r0, 32;\n\tshl.b32 %r6, %r6, 2;\n\tadd.u32 %r6, %r1, %r6;\n\tld.shared.u32 %r9, [%r6];\n\tbar.sync 0;\n\tst.global.u32 [%rd1], %r9;\n"
    );
    let found =
        per_thread(128, TILE, &body, &[0; 128]).unwrap_or_else(|finding| panic!("{finding}"));
    assert_eq!(
        found,
        (0..128).map(|thread| thread ^ 32).collect::<Vec<u32>>()
    );
    // A producer arrives and goes on; the consumer waits for it.
    let body = "\tsetp.lt.u32 %p1, %r0, 32;\n\tmov.u32 %r1, tile;\n\tmov.u32 %r9, 0;\n\t@%p1 bra USE;\n\tsetp.eq.u32 %p2, %r0, 32;\n\
                \t@%p2 st.shared.u32 [%r1], 77;\n\tbar.arrive 3, 64;\n\tbra END;\nUSE:\n\tbar.sync 3, 64;\n\tld.shared.u32 %r9, [%r1];\nEND:\n\tst.global.u32 [%rd1], %r9;\n";
    for seed in 0..4 {
        let prologue =
            "\tmov.u32 %r0, %tid.x;\n\tmul.wide.u32 %rd1, %r0, 4;\n\tadd.s64 %rd1, %rd0, %rd1;\n";
        let mut memory = bytes_of(&[0; 64]);
        let shape = Launch {
            seed,
            ..threads(64)
        };
        launch(
            &kernel(TILE, &format!("{prologue}{body}")),
            &mut memory,
            &shape,
        )
        .unwrap_or_else(|finding| panic!("{finding}"));
        assert_eq!(words_of(&memory)[31..33], [77, 0]);
    }
}

#[test]
fn threads_that_returned_are_not_waited_for() {
    let body =
        "\tsetp.ge.u32 %p1, %r0, 40;\n\t@%p1 ret;\n\tbar.sync 0;\n\tst.global.u32 [%rd1], 1;\n";
    let found = per_thread(96, "", body, &[0; 96]).unwrap_or_else(|finding| panic!("{finding}"));
    assert_eq!(found.iter().sum::<u32>(), 40);
}

#[test]
fn copies_arrive_with_their_group() {
    // Two groups: after wait_group 1 only the first is there. The second copy gives 8 of 16 bytes.
    let body = "\tmov.u32 %r1, tile;\n\tshl.b32 %r2, %r0, 5;\n\tadd.u32 %r3, %r1, %r2;\n\tmul.wide.u32 %rd2, %r0, 32;\n\tadd.s64 %rd2, %rd0, %rd2;\n\
                \tcp.async.ca.shared.global [%r3], [%rd2], 16;\n\tcp.async.commit_group;\n\
                \tcp.async.cg.shared.global [%r3+16], [%rd2+16], 16, 8;\n\tcp.async.commit_group;\n\
                \tcp.async.wait_group 1;\n\tld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r3];\n\
                \tcp.async.wait_group 0;\n\tld.shared.v4.u32 {%r14, %r15, %r16, %r17}, [%r3+16];\n\
                \tst.global.v4.u32 [%rd2], {%r17, %r16, %r15, %r14};\n\tst.global.v4.u32 [%rd2+16], {%r13, %r12, %r11, %r10};\n";
    let words: Vec<u32> = (1..=16).collect();
    let found = per_thread(2, TILE, body, &words).unwrap_or_else(|finding| panic!("{finding}"));
    assert_eq!(found, [0, 0, 6, 5, 4, 3, 2, 1, 0, 0, 14, 13, 12, 11, 10, 9]);
}

#[test]
fn local_memory_belongs_to_each_thread() {
    let variables = "\t.local .align 8 .b8 depot[16];\n";
    let body = "\tmov.u64 %rd5, depot;\n\tadd.s64 %rd6, %rd5, 8;\n\tst.local.u32 [%rd5], %r0;\n\tst.local.u16 [%rd6], %r0;\n\
                \tcvta.local.u64 %rd7, %rd6;\n\tld.u16 %r8, [%rd7];\n\tld.local.u32 %r9, [%rd5];\n\tadd.u32 %r9, %r9, %r8;\n\tst.global.u32 [%rd1], %r9;\n";
    let found =
        per_thread(40, variables, body, &[0; 40]).unwrap_or_else(|finding| panic!("{finding}"));
    assert_eq!(
        found,
        (0..40).map(|thread| thread * 2).collect::<Vec<u32>>()
    );
}

#[test]
fn generic_addresses_lead_to_shared_memory_too() {
    let body = format!(
        "{PLACES}\tmov.u64 %rd5, tile;\n\tcvta.shared.u64 %rd6, %rd5;\n\tmul.wide.u32 %rd7, %r0, 4;\n\tadd.s64 %rd6, %rd6, %rd7;\n\
         \tst.u32 [%rd6], %r0;\n\tcvta.to.shared.u64 %rd8, %rd6;\n\tld.shared.u32 %r9, [%rd8];\n\tst.global.u32 [%rd1], %r9;\n"
    );
    let found = per_thread(32, TILE, &body, &[9; 32]).unwrap_or_else(|finding| panic!("{finding}"));
    assert_eq!(found, (0..32).collect::<Vec<u32>>());
}

#[test]
fn threads_know_where_they_are() {
    let body = "\tmov.u32 %r1, %tid.x;\n\tmov.u32 %r2, %tid.y;\n\tmov.u32 %r3, %tid.z;\n\tmov.u32 %r4, %ntid.x;\n\tmov.u32 %r5, %ntid.y;\n\
                \tmad.lo.s32 %r6, %r3, %r5, %r2;\n\tmad.lo.s32 %r6, %r6, %r4, %r1;\n\tmov.u32 %r7, %ctaid.x;\n\tmov.u32 %r8, %nctaid.x;\n\tmov.u32 %r9, %ctaid.y;\n\
                \tmad.lo.s32 %r7, %r9, %r8, %r7;\n\tmov.u32 %r10, %ntid.z;\n\tmul.lo.s32 %r11, %r4, %r5;\n\tmul.lo.s32 %r11, %r11, %r10;\n\
                \tmad.lo.s32 %r12, %r7, %r11, %r6;\n\tmul.wide.u32 %rd1, %r12, 4;\n\tadd.s64 %rd1, %rd0, %rd1;\n\tmov.u32 %r13, %laneid;\n\tst.global.u32 [%rd1], %r13;\n";
    let shape = Launch {
        grid: [3, 2, 1],
        block: [5, 4, 2],
        seed: 7,
        ..Launch::default()
    };
    let mut memory = bytes_of(&[99; 240]);
    launch(&kernel("", body), &mut memory, &shape).unwrap_or_else(|finding| panic!("{finding}"));
    assert_eq!(
        words_of(&memory),
        (0..240)
            .map(|thread| thread % 40 % 32)
            .collect::<Vec<u32>>()
    );
}

#[test]
fn dynamic_shared_memory_is_as_large_as_the_launch_says() {
    let text = format!(
        "{}.extern .shared .align 16 .b8 room[];\n{}",
        machine::HEAD,
        &kernel(
            "",
            "\tmov.u32 %r1, room;\n\tst.shared.u32 [%r1+60], 5;\n\tld.shared.u32 %r2, [%r1+60];\n\tst.global.u32 [%rd0], %r2;\n"
        )[machine::HEAD.len()..]
    );
    let with = |bytes: u32| Launch {
        dynamic_shared_bytes: bytes,
        ..threads(1)
    };
    let mut memory = bytes_of(&[0]);
    launch(&text, &mut memory, &with(64)).unwrap_or_else(|finding| panic!("{finding}"));
    assert_eq!(words_of(&memory), [5]);
    let finding = launch(&text, &mut memory, &with(63)).expect_err("one byte too few");
    assert_eq!(finding.kind, ddp_ptx::Kind::OutOfBounds, "{finding}");
}

#[test]
fn errors_of_approximate_functions_stay_within_their_bounds() {
    let body = "\tld.global.f32 %r1, [%rd1];\n\tex2.approx.ftz.f32 %r9, %r1;\n\tst.global.f32 [%rd1], %r9;\n";
    let prologue =
        "\tmov.u32 %r0, %tid.x;\n\tmul.wide.u32 %rd1, %r0, 4;\n\tadd.s64 %rd1, %rd0, %rd1;\n";
    let text = kernel("", &format!("{prologue}{body}"));
    let inputs: Vec<u32> = (0..1024)
        .map(|at| (at as f32 / 64.0 - 8.0).to_bits())
        .collect();
    let mut memory = bytes_of(&inputs);
    let shape = Launch {
        errors: Some(3),
        ..threads(1024)
    };
    launch(&text, &mut memory, &shape).unwrap_or_else(|finding| panic!("{finding}"));
    let mut wrong = 0;
    for (input, found) in inputs.iter().zip(words_of(&memory)) {
        let exact = f64::from(f32::from_bits(*input)).exp2();
        let error = (f64::from(f32::from_bits(found)) - exact).abs() / exact;
        assert!(
            error <= 2f64.powi(-22),
            "2^{}: {error:e}",
            f32::from_bits(*input)
        );
        wrong += u32::from(found != (exact as f32).to_bits());
    }
    assert!(
        wrong > 500,
        "{wrong} of 1024 results differ from the nearest"
    );
}

#[test]
fn errors_of_approximate_divisions_stay_within_two_units() {
    let body = "\tld.global.f32 %r1, [%rd1];\n\tdiv.approx.f32 %r9, 0f40400000, %r1;\n\tst.global.f32 [%rd1], %r9;\n";
    let prologue =
        "\tmov.u32 %r0, %tid.x;\n\tmul.wide.u32 %rd1, %r0, 4;\n\tadd.s64 %rd1, %rd0, %rd1;\n";
    let text = kernel("", &format!("{prologue}{body}"));
    let inputs: Vec<u32> = (1..1025).map(|at| (at as f32 / 7.0).to_bits()).collect();
    let mut memory = bytes_of(&inputs);
    let shape = Launch {
        errors: Some(3),
        ..threads(1024)
    };
    launch(&text, &mut memory, &shape).unwrap_or_else(|finding| panic!("{finding}"));
    let mut wrong = 0;
    for (input, found) in inputs.iter().zip(words_of(&memory)) {
        let nearest = (3.0 / f32::from_bits(*input)).to_bits();
        assert!(
            nearest.abs_diff(found) <= 2,
            "3 / {}",
            f32::from_bits(*input)
        );
        wrong += u32::from(nearest != found);
    }
    assert!(
        wrong > 100,
        "{wrong} of 1024 quotients differ from the nearest"
    );
}

#[test]
fn what_a_launch_executes_is_counted() {
    let text = kernel("", "\tst.global.u32 [%rd0], 1;\n");
    let module = Module::parse(&text).unwrap_or_else(|refusal| panic!("{refusal}"));
    assert_eq!(module.kernels().collect::<Vec<_>>(), ["k"]);
    let kernel = module
        .kernel("k")
        .and_then(Result::ok)
        .expect("it is simulated");
    let outcome = machine::run(&text, &mut [0; 4], &threads(1), &mut Shadows::default());
    let counts = outcome.result.unwrap_or_else(|finding| panic!("{finding}"));
    // ld.param, st.global, ret.
    assert_eq!((counts.instructions, counts.thread_instructions), (3, 3));
    assert_eq!(kernel.parameters().collect::<Vec<_>>(), [8]);
}
