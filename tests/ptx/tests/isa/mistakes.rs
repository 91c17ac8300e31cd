//! Kernels that are right, and the same with one mistake in their PTX, which is found and named.

use ddp_ptx::{Finding, Kind, Launch};

use crate::machine::{bytes_of, kernel, launch, per_thread};

/// The sum of a block's words: each warp by shuffles, then the first warp over shared memory.
const SUM: &str = "\tld.global.u32 %r1, [%rd1];
	shfl.sync.bfly.b32 %r2|%p1, %r1, 16, 31, -1;
	add.u32 %r1, %r1, %r2;
	shfl.sync.bfly.b32 %r2|%p1, %r1, 8, 31, -1;
	add.u32 %r1, %r1, %r2;
	shfl.sync.bfly.b32 %r2|%p1, %r1, 4, 31, -1;
	add.u32 %r1, %r1, %r2;
	shfl.sync.bfly.b32 %r2|%p1, %r1, 2, 31, -1;
	add.u32 %r1, %r1, %r2;
	shfl.sync.bfly.b32 %r2|%p1, %r1, 1, 31, -1;
	add.u32 %r1, %r1, %r2;
	and.b32 %r3, %r0, 31;
	shr.u32 %r4, %r0, 5;
	mov.u32 %r5, partials;
	shl.b32 %r6, %r4, 2;
	add.u32 %r6, %r5, %r6;
	setp.eq.u32 %p2, %r3, 0;
	@%p2 st.shared.u32 [%r6], %r1;
	bar.sync 0;
	setp.ne.u32 %p3, %r0, 0;
	@%p3 bra END;
	ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r5];
	add.u32 %r10, %r10, %r11;
	add.u32 %r12, %r12, %r13;
	add.u32 %r10, %r10, %r12;
	st.global.u32 [%rd0], %r10;
END:
";
const PARTIALS: &str = "\t.shared .align 16 .b8 partials[16];\n";

/// The kernel with one text of it in place of another: its sum of 0 to 127.
fn sum(text: &str, other: &str) -> Result<u32, Finding> {
    assert_eq!(SUM.matches(text).count(), 1, "{text} occurs once");
    let words: Vec<u32> = (0..128).collect();
    per_thread(128, PARTIALS, &SUM.replace(text, other), &words).map(|found| found[0])
}

/// One thread counts in shared memory, and one of another warp reads that.
const COUNTED: &str = "\tmov.u32 %r5, partials;
	setp.eq.u32 %p2, %r0, 0;
	@%p2 st.shared.u32 [%r5], %r0;
	bar.sync 0;
	@%p2 atom.shared.add.u32 %r1, [%r5], 7;
	bar.sync 1;
	mov.u32 %r2, 7;
	setp.eq.u32 %p3, %r0, 32;
	@%p3 ld.shared.u32 %r2, [%r5];
	st.global.u32 [%rd1], %r2;
";

#[test]
fn atomics_on_shared_memory_are_ordered_by_barriers_and_race_with_no_other() {
    let words = [0; 64];
    let run = |body: &str| {
        let found = per_thread(64, PARTIALS, body, &words);
        found.map_err(|finding| finding.kind)
    };
    assert_eq!(run(COUNTED), Ok(vec![7; 64]));
    let without = |body: &str, barrier: u32| body.replace(&format!("\tbar.sync {barrier};\n"), "");
    assert_eq!(run(&without(COUNTED, 1)), Err(Kind::Race));
    // Of the same warp, which runs both in order.
    let other = COUNTED.replace("%r0, 32;", "%r0, 1;");
    assert_eq!(run(&other), Ok(vec![7; 64]));
    assert_eq!(run(&without(&other, 1)), Err(Kind::Race));
    let write = COUNTED.replace("ld.shared.u32 %r2, [%r5]", "st.shared.u32 [%r5], %r2");
    assert_eq!(run(&write), Ok(vec![7; 64]));
    assert_eq!(run(&without(&write, 1)), Err(Kind::Race));
    let all = COUNTED
        .replace("@%p2 atom", "atom")
        .replace("%r1, [%r5], 7", "%r1, [%r5], 0");
    let all = all.replace("mov.u32 %r2, 7", "mov.u32 %r2, 0");
    assert_eq!(run(&all), Ok(vec![0; 64]));
    assert_eq!(run(&without(&all, 0)), Err(Kind::Race));
}

#[test]
fn a_reduction_and_its_mistakes() {
    assert_eq!(
        sum("bar.sync 0;", "bar.sync 0;").map_err(|finding| finding.to_string()),
        Ok(127 * 64)
    );
    let kind = |text, other| sum(text, other).map_err(|finding| finding.kind);
    // The barrier is missing, or not all threads come to it.
    assert_eq!(kind("\tbar.sync 0;\n", ""), Err(Kind::Race));
    assert_eq!(kind("bar.sync 0;", "bar.warp.sync -1;"), Err(Kind::Race));
    assert_eq!(
        kind(
            "\tbar.sync 0;\n",
            "\t@%p2 bar.sync 0;\n\t@!%p2 bar.sync 1;\n"
        ),
        Err(Kind::Barrier)
    );
    assert_eq!(kind("bar.sync 0;", "bar.sync 0, 160;"), Err(Kind::Barrier));
    // CUDA: all threads come to one __syncthreads(). ISA: warps that say how many threads there are
    // may come to several.
    let two = "setp.lt.u32 %p4, %r0, 32;\n\t@%p4 bar.sync 0;\n\t@!%p4 bar.sync 0;";
    assert_eq!(kind("bar.sync 0;", two), Err(Kind::Barrier));
    let counted = two.replace("bar.sync 0;", "bar.sync 0, 128;");
    assert_eq!(kind("bar.sync 0;", &counted), Ok(127 * 64));
    // All lanes write the partial sum.
    assert_eq!(kind("@%p2 st.shared", "st.shared"), Err(Kind::Race));
    // Addresses: beyond the array, between its elements, where nothing is allocated.
    assert_eq!(
        kind("shl.b32 %r6, %r4, 2;", "shl.b32 %r6, %r4, 3;"),
        Err(Kind::OutOfBounds)
    );
    assert_eq!(
        kind("shl.b32 %r6, %r4, 2;", "shl.b32 %r6, %r4, 1;"),
        Err(Kind::Misaligned)
    );
    assert_eq!(
        kind(
            "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r5]",
            "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r5+8]"
        ),
        Err(Kind::Misaligned)
    );
    assert_eq!(
        kind("st.global.u32 [%rd0]", "st.global.u32 [%rd0+512]"),
        Err(Kind::OutOfBounds)
    );
    assert_eq!(
        kind("st.global.u32 [%rd0]", "st.global.u32 [%rd0+-4]"),
        Err(Kind::OutOfBounds)
    );
    assert_eq!(
        kind("st.global.u32 [%rd0]", "st.global.u32 [%rd0+2]"),
        Err(Kind::Misaligned)
    );
    // Through the read-only path, and written in the same launch.
    assert_eq!(
        kind("ld.global.u32", "ld.global.nc.u32"),
        Err(Kind::ReadOnly)
    );
    // A shuffle that some lanes skip, or whose members are others.
    let skipped = "setp.lt.u32 %p4, %r0, 5;\n\t@%p4 shfl.sync.bfly.b32 %r2|%p1, %r1, 4";
    assert_eq!(
        kind("shfl.sync.bfly.b32 %r2|%p1, %r1, 4", skipped),
        Err(Kind::Warp)
    );
    assert_eq!(
        kind("%r1, 2, 31, -1", "%r1, 2, 31, 0xffff"),
        Err(Kind::Warp)
    );
    // Wrong numbers are no finding, but another sum.
    assert_ne!(kind("%r1, 8, 31, -1", "%r1, 16, 31, -1"), Ok(127 * 64));
    assert_eq!(
        kind("add.u32 %r10, %r10, %r12;", "trap;"),
        Err(Kind::Stopped)
    );
    assert_eq!(
        kind("add.u32 %r10, %r10, %r12;", "div.u32 %r10, %r10, 0;"),
        Err(Kind::Stopped)
    );
}

#[test]
fn a_finding_says_where_it_happened() {
    let body = "\t.loc 1 12 5\n\tmov.u32 %r1, %tid.x;\n\tsetp.ne.u32 %p1, %r1, 37;\n\t@%p1 ret;\n\t.loc 1 14 9\n\tst.global.u64 [%rd0+8], %rd0;\n";
    let text = format!("{}\t.file\t1 \"/a/folder/sample.cu\"\n", kernel("", body));
    let shape = Launch {
        grid: [1, 2, 1],
        block: [64, 1, 1],
        ..Launch::default()
    };
    let finding = launch(&text, &mut bytes_of(&[0; 3]), &shape).expect_err("one word beyond");
    let line = text
        .lines()
        .position(|line| line.contains("st.global"))
        .map(|line| line as u32 + 1);
    assert_eq!(
        (Some(finding.line), finding.source.as_deref()),
        (line, Some("sample.cu:14"))
    );
    assert_eq!((finding.thread, finding.kernel.as_str()), ([37, 0, 0], "k"));
    let message = finding.to_string();
    assert!(
        message.contains("end 4 bytes past the end of the 12 bytes"),
        "{message}"
    );
}

/// Threads copy a tile and read what their neighbours copied.
const COPY: &str = "\tmov.u32 %r1, tile;
	shl.b32 %r2, %r0, 2;
	add.u32 %r3, %r1, %r2;
	cp.async.ca.shared.global [%r3], [%rd1], 4;
	cp.async.commit_group;
	cp.async.wait_group 0;
	bar.sync 0;
	xor.b32 %r4, %r2, 128;
	add.u32 %r4, %r1, %r4;
	ld.shared.u32 %r9, [%r4];
	bar.sync 0;
	st.shared.u32 [%r3], %r9;
	st.global.u32 [%rd1], %r9;
";

fn copied(text: &str, other: &str) -> Result<Vec<u32>, Kind> {
    assert!(COPY.contains(text), "{text}");
    let words: Vec<u32> = (0..64).collect();
    per_thread(
        64,
        "\t.shared .align 16 .b8 tile[256];\n",
        &COPY.replacen(text, other, 1),
        &words,
    )
    .map_err(|finding| finding.kind)
}

#[test]
fn a_tile_that_is_copied_and_its_mistakes() {
    assert_eq!(
        copied("bar.sync 0;", "bar.sync 0;"),
        Ok((0..64).map(|at| at ^ 32).collect())
    );
    assert_eq!(copied("\tcp.async.wait_group 0;\n", ""), Err(Kind::Copy));
    assert_eq!(copied("wait_group 0;", "wait_group 1;"), Err(Kind::Copy));
    assert_eq!(copied("\tcp.async.commit_group;\n", ""), Err(Kind::Copy));
    // The wait is for the thread's own copies: others need the barrier behind it.
    assert_eq!(copied("\tbar.sync 0;\n", ""), Err(Kind::Race));
    assert_eq!(
        copied(
            "\tcp.async.wait_group 0;\n\tbar.sync 0;\n",
            "\tbar.sync 0;\n\tcp.async.wait_group 0;\n"
        ),
        Err(Kind::Copy)
    );
    // Written again before all have read.
    assert_eq!(
        copied("%r9, [%r4];\n\tbar.sync 0;\n", "%r9, [%r4];\n"),
        Err(Kind::Race)
    );
    assert_eq!(
        copied("[%r3], [%rd1], 4;", "[%r3], [%rd1+2], 4;"),
        Err(Kind::Misaligned)
    );
    assert_eq!(
        copied("[%r3], [%rd1], 4;", "[%r3+256], [%rd1], 4;"),
        Err(Kind::OutOfBounds)
    );
}

#[test]
fn neighbours_within_a_word_do_not_race() {
    let body = "\tmov.u32 %r1, tile;\n\tshl.b32 %r2, %r0, 1;\n\tadd.u32 %r3, %r1, %r2;\n\tcvt.u16.u32 %h1, %r0;\n\tst.shared.u16 [%r3], %h1;\n\
                \tbar.sync 0;\n\tld.shared.u16 %r9, [%r3];\n\tst.global.u32 [%rd1], %r9;\n";
    let found = per_thread(64, "\t.shared .align 16 .b8 tile[128];\n", body, &[0; 64])
        .unwrap_or_else(|finding| panic!("{finding}"));
    assert_eq!(found, (0..64).collect::<Vec<u32>>());
}

#[test]
fn orders_within_a_warp_need_its_barrier() {
    let of = |barrier: &str| {
        let body = format!(
            "\tmov.u32 %r1, tile;\n\tshl.b32 %r2, %r0, 2;\n\tadd.u32 %r3, %r1, %r2;\n\tst.shared.u32 [%r3], %r0;\n{barrier}\
             \txor.b32 %r4, %r2, 4;\n\tadd.u32 %r4, %r1, %r4;\n\tld.shared.u32 %r9, [%r4];\n\tst.global.u32 [%rd1], %r9;\n"
        );
        per_thread(32, "\t.shared .align 16 .b8 tile[128];\n", &body, &[0; 32])
            .map_err(|finding| finding.kind)
    };
    assert_eq!(
        of("\tbar.warp.sync -1;\n"),
        Ok((0..32).map(|lane| lane ^ 1).collect())
    );
    assert_eq!(of(""), Err(Kind::Race));
    // A shuffle orders no memory.
    assert_eq!(
        of("\tshfl.sync.bfly.b32 %r9|%p1, %r0, 1, 31, -1;\n"),
        Err(Kind::Race)
    );
}

#[test]
fn arguments_and_shapes_must_fit_the_kernel() {
    let text = kernel("", "").replace(")\n{", ")\n.maxntid 64, 1, 1\n{");
    let finding = launch(
        &text,
        &mut [0; 4],
        &Launch {
            grid: [1, 1, 1],
            block: [65, 1, 1],
            ..Launch::default()
        },
    )
    .expect_err("65 threads");
    assert!(finding.message.contains(".maxntid allows 64"), "{finding}");
    let text = kernel("", "").replace("k_param_0\n)", "k_param_0,\n\t.param .u32 k_param_1\n)");
    let finding = launch(
        &text,
        &mut [0; 4],
        &Launch {
            grid: [1, 1, 1],
            block: [1, 1, 1],
            ..Launch::default()
        },
    )
    .expect_err("one argument");
    assert!(
        finding.message.contains("parameters have [8, 4]"),
        "{finding}"
    );
}
