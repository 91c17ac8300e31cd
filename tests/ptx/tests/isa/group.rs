//! `wgmma`: where the ISA says that elements of matrices are, and what it forbids.

use ddp_ptx::{Finding, Kind};

use crate::machine::per_thread;

/// Where a matrix is: A in registers, or one in shared memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Registers,
    /// K-major, from this k on of 64 in a row.
    K(usize),
    /// M- or N-major.
    Mn,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    columns: usize,
    a: Layout,
    b: Layout,
    scale_d: &'static str,
    scales: [i32; 2],
    /// Added to both descriptors.
    other_bits: u64,
}

const CASE: Case = Case {
    columns: 8,
    a: Layout::Registers,
    b: Layout::K(0),
    scale_d: "1",
    scales: [1, 1],
    other_bits: 0,
};

/// Bytes from 8 rows, or 8 ks, to the next 8; and from 64 rows or columns to the next 64.
const STRIDE: usize = 2048;
const LEADING: usize = 8192;
/// Where B begins in the shared memory of these tests, and where it all ends.
const B_AT: usize = 16384;
const TILE_BYTES: usize = B_AT + 256 / 8 * STRIDE;
const TILE_WORDS: usize = TILE_BYTES / 4;
const VARIABLES: &str =
    "\t.shared .align 1024 .b8 tile[81920];\n\t.reg .f32 %f<128>;\n\t.reg .b32 %a<4>;\n";

fn a(row: usize, k: usize) -> f32 {
    ((row * 5 + k * 3) % 7) as f32 - 3.0
}

fn b(k: usize, column: usize) -> f32 {
    ((k * 2 + column * 3) % 11) as f32 - 5.0
}

fn c(row: usize, column: usize) -> f32 {
    (row * 8 + column) as f32
}

/// The byte of an element: ISA, "Canonical Layouts" for elements of 16 bits, T = 8. K-major
/// Swizzle<3,4,3> o ((8,m),(T,2k)):((8T,SBO),(1,T)), MN-major ((T,8,m),(8,k)):((1,T,LBO),(8T,SBO)).
/// The swizzle exchanges packs of 16 bytes within 128 by the number of these 128 among 8.
fn byte_of(layout: Layout, other: usize, k: usize) -> usize {
    match layout {
        Layout::K(first) => {
            let k = first + k;
            other / 8 * STRIDE + other % 8 * 128 + ((k / 8) ^ (other % 8)) * 16 + k % 8 * 2
        }
        _ => {
            let pack = (other % 64 / 8) ^ (k % 8);
            other / 64 * LEADING + k / 8 * STRIDE + k % 8 * 128 + pack * 16 + other % 8 * 2
        }
    }
}

fn half(value: f32) -> u32 {
    value.to_bits() >> 16
}

/// Row and column of the elements of D, by thread and register. ISA, the figure of accumulator D.
fn of_sum(thread: usize, index: usize) -> (usize, usize) {
    let row = thread / 32 * 16 + thread % 32 / 4 + index / 2 % 2 * 8;
    (row, index / 4 * 8 + thread % 4 * 2 + index % 2)
}

fn list(prefix: &str, count: usize) -> String {
    let names: Vec<String> = (0..count).map(|at| format!("%{prefix}{at}")).collect();
    format!("{{{}}}", names.join(", "))
}

fn opcode(columns: usize) -> String {
    format!("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16")
}

/// %r3 is the thread's first word of shared memory; of the warps, %p3 has the first two.
const START: &str = "\tmov.u32 %r1, tile;\n\tshl.b32 %r2, %r0, 2;\n\tadd.u32 %r3, %r1, %r2;\n\tsetp.eq.u32 %p1, 0, 0;\n\tsetp.ne.u32 %p2, 0, 0;\n\tsetp.lt.u32 %p3, %r0, 64;\n";

/// A kernel of one product: word i of a thread is in row i of memory.
fn body(case: Case) -> String {
    let sums = case.columns / 2;
    let mut body = START.to_owned();
    for row in 0..TILE_WORDS / 128 {
        let at = row * 512;
        body += &format!("\tld.global.u32 %r4, [%rd1+{at}];\n\tst.shared.u32 [%r3+{at}], %r4;\n");
    }
    body += "\tfence.proxy.async.shared::cta;\n\tbar.sync 0;\n";
    let row_of = |word: usize| TILE_BYTES + word * 512;
    for word in 0..4 {
        body += &format!("\tld.global.u32 %a{word}, [%rd1+{}];\n", row_of(word));
    }
    for word in 0..sums {
        body += &format!("\tld.global.f32 %f{word}, [%rd1+{}];\n", row_of(word + 4));
    }
    let descriptor = |layout: Layout, at: usize| {
        let first = if let Layout::K(first) = layout {
            first * 2
        } else {
            0
        };
        let fields = (STRIDE as u64 / 16) << 32 | (LEADING as u64 / 16) << 16 | 1 << 62;
        ((at + first) as u64 / 16 + fields).wrapping_add(case.other_bits)
    };
    body += &format!(
        "\tshr.u32 %r5, %r1, 4;\n\tcvt.u64.u32 %rd2, %r5;\n\tadd.s64 %rd3, %rd2, {};\n\tadd.s64 %rd4, %rd2, {};\n",
        descriptor(case.a, 0),
        descriptor(case.b, B_AT)
    );
    let (left, turned) = match case.a {
        Layout::Registers => (list("a", 4), ""),
        Layout::K(_) => ("%rd3".to_owned(), ", 0"),
        Layout::Mn => ("%rd3".to_owned(), ", 1"),
    };
    body += &format!(
        "\twgmma.fence.sync.aligned;\n\t{} {}, {left}, %rd4, {}, {}, {}{turned}, {};\n\
         \twgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;\n",
        opcode(case.columns),
        list("f", sums),
        case.scale_d,
        case.scales[0],
        case.scales[1],
        u32::from(case.b == Layout::Mn)
    );
    for word in 0..sums {
        body += &format!("\tst.global.f32 [%rd1+{}], %f{word};\n", row_of(word + 4));
    }
    body
}

/// The words of memory: shared memory, then by thread the fragments of A and of D.
fn words(case: Case, sum: impl Fn(usize, usize) -> f32) -> Vec<u32> {
    // What is not given is NaN, which shows.
    let mut words = vec![u32::MAX; TILE_WORDS + (4 + case.columns / 2) * 128];
    let mut put = |byte: usize, value: f32| {
        let shift = byte % 4 * 8;
        words[byte / 4] = words[byte / 4] & !(0xffff << shift) | half(value) << shift;
    };
    for k in 0..16 {
        for row in (0..64).filter(|_| case.a != Layout::Registers) {
            put(byte_of(case.a, row, k), a(row, k));
        }
        for column in 0..case.columns {
            put(B_AT + byte_of(case.b, column, k), b(k, column));
        }
    }
    for thread in 0..128 {
        // ISA, the figure of matrix A: registers of two halves, low first.
        for word in (0..4).filter(|_| case.a == Layout::Registers) {
            let row = thread / 32 * 16 + thread % 32 / 4 + word % 2 * 8;
            let k = thread % 4 * 2 + word / 2 * 8;
            words[TILE_WORDS + word * 128 + thread] = half(a(row, k)) | half(a(row, k + 1)) << 16;
        }
        for index in 0..case.columns / 2 {
            let (row, column) = of_sum(thread, index);
            words[TILE_WORDS + (4 + index) * 128 + thread] = sum(row, column).to_bits();
        }
    }
    words
}

/// Checks D = A·B·`factor` + C, or without C.
#[track_caller]
fn check(case: Case, adds: bool, factor: f32) {
    let before = |row, column| if adds { c(row, column) } else { f32::NAN };
    let found = per_thread(128, VARIABLES, &body(case), &words(case, before))
        .unwrap_or_else(|finding| panic!("{case:?}: {finding}"));
    for thread in 0..128 {
        for index in 0..case.columns / 2 {
            let (row, column) = of_sum(thread, index);
            let product: f32 = (0..16).map(|k| a(row, k) * b(k, column)).sum();
            let expected = product * factor + if adds { c(row, column) } else { 0.0 };
            let found = f32::from_bits(found[TILE_WORDS + (4 + index) * 128 + thread]);
            assert_eq!(found, expected, "{case:?}: row {row}, column {column}");
        }
    }
}

#[test]
fn elements_are_where_the_isa_says() {
    for columns in [8, 24, 64, 136, 256] {
        for a in [Layout::Registers, Layout::K(0), Layout::K(16), Layout::Mn] {
            for b in [Layout::K(0), Layout::K(48), Layout::Mn] {
                let case = Case {
                    columns,
                    a,
                    b,
                    ..CASE
                };
                check(case, true, 1.0);
            }
        }
    }
}

#[test]
fn scales_negate_and_leave_the_accumulator_out() {
    for (scales, factor) in [([-1, 1], -1.0), ([1, -1], -1.0), ([-1, -1], 1.0)] {
        check(Case { scales, ..CASE }, true, factor);
    }
    for (scale_d, adds) in [("1", true), ("%p1", true), ("0", false), ("%p2", false)] {
        check(Case { scale_d, ..CASE }, adds, 1.0);
    }
}

fn run(threads: u32, body: &str) -> Result<Vec<u32>, Finding> {
    per_thread(threads, VARIABLES, body, &words(CASE, c))
}

/// What is found in the kernel with one text of it in place of another.
fn kind(text: &str, other: &str) -> Result<(), Kind> {
    let body = body(CASE);
    assert_eq!(body.matches(text).count(), 1, "{text} occurs once");
    let result = run(128, &body.replace(text, other));
    result.map(drop).map_err(|finding| finding.kind)
}

const FENCE: &str = "\twgmma.fence.sync.aligned;\n";
const COMMIT: &str = "\twgmma.commit_group.sync.aligned;\n";
const WAIT: &str = "\twgmma.wait_group.sync.aligned 0;\n";
const PROXY: &str = "\tfence.proxy.async.shared::cta;\n";
const BARRIER: &str = "\tbar.sync 0;\n";
/// The same product again, one of another shape, and one whose A is the first one's accumulator.
const AGAIN: &str = "\twgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, {%a0, %a1, %a2, %a3}, %rd4, 1, 1, 1, 0;\n";
const WIDER: &str = "\twgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}, {%a0, %a1, %a2, %a3}, %rd4, 1, 1, 1, 0;\n";
const CHAINED: &str = "\twgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f4, %f5, %f6, %f7}, {%f0, %f1, %f2, %f3}, %rd4, 1, 1, 1, 0;\n";
const OTHER: &str = "\twgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f4, %f5, %f6, %f7}, {%a0, %a1, %a2, %a3}, %rd4, 1, 1, 1, 0;\n";

#[test]
fn registers_in_flight_are_not_touched() {
    let before_wait = |text: &str| kind(WAIT, &format!("{text}{WAIT}"));
    assert_eq!(kind(WAIT, WAIT), Ok(()));
    assert_eq!(kind(WAIT, ""), Err(Kind::Flight));
    assert_eq!(kind("aligned 0;", "aligned 1;"), Err(Kind::Flight));
    assert_eq!(kind(COMMIT, ""), Err(Kind::Flight));
    assert_eq!(
        kind(&format!("{COMMIT}{WAIT}"), &format!("{WAIT}{COMMIT}")),
        Err(Kind::Flight)
    );
    for access in [
        "\tmov.b32 %r9, %a3;\n",
        "\tmov.b32 %a3, 0;\n",
        "\tmov.f32 %f3, 0f00000000;\n",
        "\tmov.b64 %rd9, {%f0, %f1};\n",
        "\t@%p3 st.global.f32 [%rd1], %f3;\n",
    ] {
        assert_eq!(before_wait(access), Err(Kind::Flight), "{access}");
        assert_eq!(kind(WAIT, &format!("{WAIT}{access}")), Ok(()), "{access}");
    }
    assert_eq!(before_wait("\t@%p2 mov.b32 %a3, 0;\n"), Ok(()));
    // A fence is no wait.
    assert_eq!(
        before_wait(&format!("{FENCE}\tmov.b32 %a3, 0;\n")),
        Err(Kind::Flight)
    );
    // Accumulators are used in order by products of one shape, and A by several.
    let before_commit = |text: &str| kind(COMMIT, &format!("{text}{COMMIT}"));
    assert_eq!(before_commit(AGAIN), Ok(()));
    assert_eq!(before_commit(OTHER), Ok(()));
    assert_eq!(before_commit(WIDER), Err(Kind::Flight));
    assert_eq!(before_commit(CHAINED), Err(Kind::Flight));
    // Of two groups one is waited for.
    let read = |register: &str| {
        let later = format!(
            "{COMMIT}{OTHER}{COMMIT}\twgmma.wait_group.sync.aligned 1;\n\tmov.b32 %r9, {register};\n{WAIT}"
        );
        kind(&format!("{COMMIT}{WAIT}"), &later)
    };
    assert_eq!(read("%f0"), Ok(()));
    assert_eq!(read("%f4"), Err(Kind::Flight));
    // The later group reads A, too.
    assert_eq!(read("%a0"), Err(Kind::Flight));
}

#[test]
fn registers_need_a_fence_before_the_product() {
    assert_eq!(kind(FENCE, ""), Err(Kind::Fence));
    let after_fence = |text: &str| kind(FENCE, &format!("{FENCE}{text}"));
    assert_eq!(
        after_fence("\tmov.f32 %f3, 0f00000000;\n"),
        Err(Kind::Fence)
    );
    assert_eq!(after_fence("\tmov.f32 %f9, %f3;\n"), Err(Kind::Fence));
    assert_eq!(after_fence("\tmov.b32 %a0, 0;\n"), Err(Kind::Fence));
    assert_eq!(after_fence("\t@%p3 mov.b32 %a0, 0;\n"), Err(Kind::Fence));
    // A that is only read by both, and what is no fragment.
    assert_eq!(after_fence("\tmov.b32 %r9, %a0;\n"), Ok(()));
    assert_eq!(after_fence("\tmov.f32 %f9, 0f00000000;\n"), Ok(()));
    // After the wait: the exception is for accumulators of one shape that only products use.
    let after_wait = |text: &str| kind(WAIT, &format!("{WAIT}{text}{COMMIT}{WAIT}"));
    assert_eq!(after_wait(AGAIN), Ok(()));
    for other in [WIDER, CHAINED, &format!("\tmov.f32 %f9, %f0;\n{AGAIN}")] {
        assert_eq!(after_wait(other), Err(Kind::Fence), "{other}");
        let fenced = other.replacen("\twgmma", &format!("{FENCE}\twgmma"), 1);
        assert_eq!(after_wait(&fenced), Ok(()), "{fenced}");
    }
}

#[test]
fn shared_memory_needs_a_proxy_fence_by_its_writer() {
    assert_eq!(kind(PROXY, ""), Err(Kind::Fence));
    assert_eq!(kind(PROXY, "\tfence.acq_rel.cta;\n"), Err(Kind::Fence));
    assert_eq!(kind(PROXY, &format!("\t@%p3{PROXY}")), Err(Kind::Fence));
    // Before the writes.
    let early = format!("{PROXY}{}", body(CASE).replace(PROXY, ""));
    assert_eq!(run(128, &early).map_err(|it| it.kind), Err(Kind::Fence));
    // By a thread that only knows of the write.
    let late = format!("{BARRIER}{PROXY}");
    assert_eq!(kind(&format!("{PROXY}{BARRIER}"), &late), Err(Kind::Fence));
    assert_eq!(kind(PROXY, "\tfence.proxy.async;\n"), Ok(()));
    assert_eq!(kind(BARRIER, ""), Err(Kind::Race));
    // Copies are written when they were waited for.
    let copy = format!(
        "\tadd.u32 %r6, %r3, {B_AT};\n\tcp.async.ca.shared.global [%r6], [%rd1+{B_AT}], 4;\n"
    );
    let waited = "\tcp.async.wait_all;\n";
    assert_eq!(kind(PROXY, &format!("{copy}{waited}{PROXY}")), Ok(()));
    assert_eq!(
        kind(PROXY, &format!("{copy}{PROXY}{waited}")),
        Err(Kind::Fence)
    );
    assert_eq!(kind(PROXY, &format!("{copy}{PROXY}")), Err(Kind::Copy));
}

#[test]
fn shared_memory_is_not_written_while_a_product_reads_it() {
    let write = format!("\tst.shared.u32 [%r3+{B_AT}], 0;\n");
    let copy =
        format!("\tadd.u32 %r6, %r3, {B_AT};\n\tcp.async.ca.shared.global [%r6], [%rd1], 4;\n");
    let elsewhere = format!("\tst.shared.u32 [%r3+{}], 0;\n", B_AT + 8192);
    let read = format!("\tld.shared.u32 %r9, [%r3+{B_AT}];\n");
    let before_wait = |text: &str| kind(WAIT, &format!("{BARRIER}{text}{WAIT}"));
    // The writer may be a lane of any warp.
    assert_eq!(before_wait(&write), Err(Kind::Flight));
    assert_eq!(before_wait(&copy), Err(Kind::Flight));
    assert_eq!(before_wait(&elsewhere), Ok(()));
    assert_eq!(before_wait(&read), Ok(()));
    // Other warps may not have waited yet.
    let after_wait = |text: &str| kind(WAIT, &format!("{WAIT}{text}"));
    assert_eq!(after_wait(&write), Err(Kind::Race));
    assert_eq!(after_wait(&format!("{BARRIER}{write}")), Ok(()));
}

#[test]
fn the_four_warps_of_a_warpgroup_execute_the_same() {
    // A warpgroup begins at a multiple of four warps.
    for (threads, is_whole) in [
        (128, true),
        (256, true),
        (96, false),
        (160, false),
        (250, false),
    ] {
        let found = run(threads, FENCE).map(drop).map_err(|it| it.kind);
        let expected = if is_whole { Ok(()) } else { Err(Kind::Warp) };
        assert_eq!(found, expected, "{threads} threads");
    }
    let whole = body(CASE);
    // Half of the warps, half of the lanes, or lanes with other operands.
    let product = whole
        .lines()
        .find(|line| line.contains("mma_async"))
        .expect("it has one");
    let guarded = format!("\t@%p3{product}");
    assert_eq!(kind(product, &guarded), Err(Kind::Warp));
    let some_lanes = format!("\tand.b32 %r6, %r0, 1;\n\tsetp.eq.u32 %p3, %r6, 0;\n{guarded}");
    assert_eq!(kind(product, &some_lanes), Err(Kind::Warp));
    let all = format!("\t@%p1{product}");
    assert_eq!(kind(product, &all), Ok(()));
    let scaled = product.replace("%rd4, 1,", "%rd4, %p3,");
    assert_eq!(kind(product, &scaled), Err(Kind::Warp));
    let moved = format!("\t@%p3 add.s64 %rd4, %rd4, 2;\n{product}");
    assert_eq!(kind(product, &moved), Err(Kind::Warp));
    let lanes = format!("\tsetp.ne.u32 %p4, %r0, 5;\n\t@%p4 add.s64 %rd4, %rd4, 2;\n{product}");
    assert_eq!(kind(product, &lanes), Err(Kind::Warp));
    // Also of fences, groups and waits; and on one side of a barrier.
    for text in [FENCE, COMMIT, WAIT] {
        assert_eq!(
            kind(text, &format!("{text}\t@%p3{text}")),
            Err(Kind::Warp),
            "{text}"
        );
    }
    let apart = format!("\t@%p3 bar.sync 0, 128;\n{COMMIT}\t@!%p3 bar.sync 0, 128;\n");
    assert_eq!(kind(COMMIT, &apart), Err(Kind::Warp));
}

#[test]
fn other_layouts_are_refused_by_name() {
    for (other_bits, named) in [
        // Modulo 4, added to 1.
        (3 << 62, "a matrix without swizzle"),
        (1 << 62, "the 64-byte swizzle"),
        (2 << 62, "the 32-byte swizzle"),
        (3 << 49, "base offset 3"),
        (1 << 46, "a bit that the ISA leaves undefined"),
    ] {
        let case = Case { other_bits, ..CASE };
        let finding = run(128, &body(case)).expect_err(named);
        assert_eq!(finding.kind, Kind::Stopped, "{finding}");
        assert!(finding.message.contains(named), "{finding}");
    }
    let body = body(CASE).replace("%rd4, 1,", "%rd5, 1,");
    let beyond = format!("\tadd.s64 %rd5, %rd4, {};\n{FENCE}", 0x2000);
    let finding = run(128, &body.replace(FENCE, &beyond)).expect_err("beyond the tile");
    assert_eq!(finding.kind, Kind::OutOfBounds, "{finding}");
}
