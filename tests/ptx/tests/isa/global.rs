//! Global memory: which bytes a launch touches, and the order of threads that touch the same ones
//! (PTX ISA, "Memory Consistency Model").

mod launches;

use ddp_ptx::{Finding, Footprint, Kind, Launch, Shadows};

use crate::machine::{Memory, START, bytes_of, kernel, launch, run, run_on, threads, words_of};

fn shape(blocks: u32, threads: u32, seed: u64) -> Launch {
    Launch {
        grid: [blocks, 1, 1],
        block: [threads, 1, 1],
        seed,
        ..Launch::default()
    }
}

/// Thread i, counted over all blocks, has its number in %r0, that in its block in %r1, that of its
/// block in %r2, the address of word i in %rd1.
const NUMBERS: &str = "\tmov.u32 %r1, %tid.x;\n\tmov.u32 %r2, %ctaid.x;\n\tmov.u32 %r3, %ntid.x;\n\tmad.lo.s32 %r0, %r2, %r3, %r1;\n\
                       \tmul.wide.u32 %rd1, %r0, 4;\n\tadd.s64 %rd1, %rd0, %rd1;\n";

/// What a kernel with this body is found to do wrong, under each of several seeds.
fn found(blocks: u32, threads: u32, body: &str) -> Vec<Option<Kind>> {
    let text = kernel("", &format!("{NUMBERS}{body}"));
    let of = |seed| {
        let mut memory = bytes_of(&[0; 256]);
        launch(&text, &mut memory, &shape(blocks, threads, seed))
            .err()
            .map(|finding| finding.kind)
    };
    (0..12).map(of).collect()
}

fn races(blocks: u32, threads: u32, body: &str) {
    let found = found(blocks, threads, body);
    assert_eq!(found, [Some(Kind::Race); 12], "{body}");
}

fn is_ordered(blocks: u32, threads: u32, body: &str) {
    assert_eq!(found(blocks, threads, body), [None; 12], "{body}");
}

#[test]
fn touched_bytes_are_exact() {
    // Thread i reads the third byte of word i, and writes the upper half of word 8 + i.
    let body = "\tld.global.u8 %r4, [%rd1+2];\n\tcvt.u16.u32 %h1, %r4;\n\tst.global.u16 [%rd1+34], %h1;\n\tred.global.add.u32 [%rd0+96], 1;\n";
    let text = kernel("", &format!("{NUMBERS}{body}"));
    for seed in 0..4 {
        let mut memory = bytes_of(&[0x030201; 64]);
        let outcome = run(
            &text,
            &mut memory,
            &shape(2, 3, seed),
            &mut Shadows::default(),
        );
        let at = |from: u64, bytes: u64| {
            let start = move |i: u64| START + from + 4 * i;
            (0..6).map(|i| start(i)..start(i) + bytes).collect()
        };
        assert!(outcome.result.is_ok());
        let atomics = START + 96..START + 100;
        let touched = Footprint {
            reads: at(2, 1),
            writes: at(34, 2),
            atomics: Vec::from([atomics]),
        };
        assert_eq!(outcome.touched, touched);
        let words = words_of(&memory);
        assert_eq!((words[8] >> 16, words[24]), (3, 0x030201 + 6));
    }
    // Up to a mistake, and neighbours as one range.
    let body = "\tst.global.v4.u32 [%rd0+56], {%r0, %r0, %r0, %r0};\n";
    let wrong = run(
        &kernel("", body),
        &mut [0; 64],
        &threads(1),
        &mut Shadows::default(),
    );
    assert_eq!(wrong.touched, Footprint::default());
    let body = "\tst.global.u64 [%rd0+56], %rd0;\n\tst.global.u64 [%rd0+64], %rd0;\n\ttrap;\n";
    let wrong = run(
        &kernel("", body),
        &mut [0; 128],
        &threads(1),
        &mut Shadows::default(),
    );
    assert!(wrong.result.is_err());
    let both = START + 56..START + 72;
    assert_eq!(wrong.touched.writes, Vec::from([both]));
}

#[test]
fn threads_of_a_block_are_ordered_by_its_barriers() {
    let next =
        "\txor.b32 %r4, %r1, 32;\n\tmul.wide.u32 %rd2, %r4, 4;\n\tadd.s64 %rd2, %rd0, %rd2;\n";
    let reads = "\tld.global.u32 %r5, [%rd2];\n\tst.global.u32 [%rd1+512], %r5;\n";
    let exchange = |between: &str| format!("{next}\tst.global.u32 [%rd1], %r1;\n{between}{reads}");
    is_ordered(1, 64, &exchange("\tbar.sync 0;\n"));
    races(1, 64, &exchange(""));
    races(1, 64, &exchange("\tbar.warp.sync -1;\n"));
    races(1, 64, &exchange("\tfence.acq_rel.gpu;\n"));
    // A read, then a write by another thread.
    let back = |between: &str| {
        format!("{next}\tld.global.u32 %r5, [%rd2];\n{between}\tst.global.u32 [%rd1], %r5;\n")
    };
    is_ordered(1, 64, &back("\tbar.sync 0;\n"));
    races(1, 64, &back(""));
    // Within a warp its barrier is enough, for the lanes that it names.
    let within = |barrier: &str| exchange(barrier).replace("%r1, 32;", "%r1, 1;");
    is_ordered(1, 64, &within("\tbar.warp.sync -1;\n"));
    races(1, 64, &within(""));
    let half = "\tsetp.lt.u32 %p1, %r1, 16;\n\t@%p1 bar.warp.sync 0xffff;\n";
    races(1, 32, &exchange(half).replace("%r1, 32;", "%r1, 16;"));
    is_ordered(1, 16, &exchange(half).replace("%r1, 32;", "%r1, 1;"));
    // All lanes read one word, and one writes it after the barrier of the warp.
    let shared = |barrier: &str| {
        format!(
            "\tld.global.u32 %r4, [%rd0];\n{barrier}\tsetp.eq.u32 %p1, %r1, 7;\n\t@%p1 st.global.u32 [%rd0], %r1;\n"
        )
    };
    is_ordered(1, 32, &shared("\tbar.warp.sync -1;\n"));
    races(1, 32, &shared(""));
    races(1, 64, &shared("\tbar.warp.sync -1;\n"));
    // Equal values race, too; neighbours in one word do not.
    races(1, 64, "\tst.global.u32 [%rd0], 1;\n");
    let bytes =
        "\tcvt.u64.u32 %rd2, %r0;\n\tadd.s64 %rd2, %rd0, %rd2;\n\tst.global.u8 [%rd2], %r0;\n";
    is_ordered(2, 64, bytes);
}

#[test]
fn blocks_are_not_ordered() {
    races(3, 1, "\tst.global.u32 [%rd0], %r2;\n");
    races(2, 1, "\tst.global.u32 [%rd0], %r2;\n\tbar.sync 0;\n");
    is_ordered(
        3,
        1,
        "\tld.global.u32 %r4, [%rd0];\n\tst.global.u32 [%rd1+64], %r4;\n",
    );
    // One block writes what all read.
    races(
        3,
        1,
        "\tld.global.u32 %r4, [%rd0];\n\tsetp.eq.u32 %p1, %r2, 1;\n\t@%p1 st.global.u32 [%rd0], %r4;\n",
    );
}

#[test]
fn strong_accesses_do_not_race_with_their_like() {
    let add = "\tred.global.add.u32 [%rd0], 1;\n";
    is_ordered(2, 64, add);
    // ISA: with scope cta they are strong for their own block only.
    is_ordered(1, 64, "\tred.relaxed.cta.global.add.u32 [%rd0], 1;\n");
    races(2, 1, "\tred.relaxed.cta.global.add.u32 [%rd0], 1;\n");
    is_ordered(
        2,
        64,
        "\tst.volatile.global.u32 [%rd0], 1;\n\tld.relaxed.sys.global.u32 %r4, [%rd0];\n",
    );
    races(
        1,
        64,
        "\tst.volatile.global.u32 [%rd0], 1;\n\tld.global.u32 %r4, [%rd0];\n",
    );
    let beside = |other: &str| {
        format!(
            "\tsetp.eq.u32 %p1, %r0, 5;\n\t@!%p1 red.global.add.u32 [%rd0], 1;\n\t@%p1 {other}\n"
        )
    };
    races(1, 64, &beside("st.global.u32 [%rd0], 1;"));
    races(1, 64, &beside("ld.global.u32 %r4, [%rd0];"));
    races(64, 1, &beside("ld.global.u32 %r4, [%rd0];"));
    is_ordered(64, 1, &beside("ld.relaxed.gpu.global.u32 %r4, [%rd0];"));
}

/// Each of 16 blocks writes a word and counts; the one that counts last reads all of them.
const LAST: &str = "\tst.global.u32 [%rd1+64], 3;
	fence.acq_rel.gpu;
	atom.global.add.u32 %r4, [%rd0], 1;
	fence.acq_rel.gpu;
	setp.ne.u32 %p1, %r4, 15;
	@%p1 bra END;
	mov.u32 %r5, 0;
	mov.u32 %r6, 0;
	mov.u64 %rd2, %rd0;
LOOP:
	ld.global.u32 %r7, [%rd2+64];
	add.u32 %r5, %r5, %r7;
	add.s64 %rd2, %rd2, 4;
	add.u32 %r6, %r6, 1;
	setp.lt.u32 %p2, %r6, 16;
	@%p2 bra LOOP;
	st.global.u32 [%rd0+4], %r5;
END:
";
const FENCE: &str = "\tfence.acq_rel.gpu;\n";
const COUNT: &str = "\tatom.global.add.u32 %r4, [%rd0], 1;\n";

/// The sum, where the middle of the kernel is another one, in many orders.
fn last(before: &str, count: &str, after: &str) -> Result<(), Kind> {
    let middle = format!("{FENCE}{COUNT}{FENCE}");
    assert_eq!(LAST.matches(&middle).count(), 1);
    let text = kernel(
        "",
        &format!(
            "{NUMBERS}{}",
            LAST.replace(&middle, &format!("{before}{count}{after}"))
        ),
    );
    let of = |seed| {
        let mut memory = bytes_of(&[0; 256]);
        launch(&text, &mut memory, &shape(16, 1, seed)).map_err(|finding| finding.kind)?;
        assert_eq!(words_of(&memory)[1], 48);
        Ok(())
    };
    let all: Vec<Result<(), Kind>> = (0..12).map(of).collect();
    assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
    all[0]
}

#[test]
fn blocks_learn_of_each_other_by_release_and_acquire_patterns() {
    let race = Err(Kind::Race);
    assert_eq!(last(FENCE, COUNT, FENCE), Ok(()));
    assert_eq!(last("", COUNT, FENCE), race);
    assert_eq!(last(FENCE, COUNT, ""), race);
    for fence in [
        "membar.gl",
        "membar.sys",
        "fence.sc.gpu",
        "fence.acq_rel.sys",
    ] {
        let fence = format!("\t{fence};\n");
        assert_eq!(last(&fence, COUNT, &fence), Ok(()), "{fence}");
    }
    for fence in ["membar.cta", "fence.acq_rel.cta", "fence.sc.cluster"] {
        let fence = format!("\t{fence};\n");
        assert_eq!(last(&fence, COUNT, FENCE), race, "{fence}");
        assert_eq!(last(FENCE, COUNT, &fence), race, "{fence}");
    }
    let (releases, acquires) = ("\tfence.release.gpu;\n", "\tfence.acquire.gpu;\n");
    assert_eq!(last(releases, COUNT, acquires), Ok(()));
    assert_eq!(last(acquires, COUNT, releases), race);
    // The atomic itself, in place of one fence or both.
    let atomic = |semantics: &str| COUNT.replace("atom.", &format!("atom.{semantics}."));
    assert_eq!(last("", &atomic("acq_rel.gpu"), ""), Ok(()));
    assert_eq!(last("", &atomic("release.gpu"), FENCE), Ok(()));
    assert_eq!(last(FENCE, &atomic("acquire.gpu"), ""), Ok(()));
    assert_eq!(last("", &atomic("release.gpu"), ""), race);
    assert_eq!(last("", &atomic("acquire.gpu"), ""), race);
    assert_eq!(last(FENCE, &atomic("relaxed.cta"), FENCE), race);
    // ISA: what `red` reads is no acquire pattern; a strong load after it is.
    let red = "\tred.global.add.u32 [%rd0], 1;\n";
    let then = |load: &str| format!("{red}\t{load}.u32 %r4, [%rd0];\n\tsub.u32 %r4, %r4, 1;\n");
    assert_eq!(last(FENCE, &then("ld.relaxed.gpu.global"), FENCE), Ok(()));
    assert_eq!(last(FENCE, &then("ld.volatile.global"), FENCE), Ok(()));
    assert_eq!(last(FENCE, &then("ld.acquire.gpu.global"), ""), Ok(()));
    assert_eq!(last(FENCE, &then("ld.relaxed.gpu.global"), ""), race);
    assert_eq!(last(FENCE, &then("ld.global"), FENCE), race);
    // What is written after the fence is not published by it.
    let write = "\tst.global.u32 [%rd1+64], 3;\n";
    assert_eq!(last(FENCE, &format!("{write}{COUNT}"), FENCE), race);
    assert_eq!(last(FENCE, COUNT, &format!("{FENCE}{write}")), race);
    // An atomic on an address that no other block reads publishes nothing.
    let own = COUNT.replace("[%rd0]", "[%rd1+128]");
    let apart = format!("{own}\tatom.relaxed.gpu.global.add.u32 %r4, [%rd0], 1;\n");
    assert_eq!(last("", &format!("{FENCE}{apart}"), FENCE), Ok(()));
    let before = format!(
        "\tatom.global.add.u32 %r4, [%rd0], 1;\n{FENCE}\tatom.global.add.u32 %r8, [%rd1+128], 1;\n"
    );
    assert_eq!(last("", &before, FENCE), race);
}

#[test]
fn the_last_block_may_change_what_all_have_read_and_counted() {
    let of = |block: &str, seed| {
        let body = LAST
            .replace("\tfence", "\tld.global.u32 %r9, [%rd0+8];\n\tfence")
            .replace("END:\n", &format!("{block}END:\n"));
        let text = kernel("", &format!("{NUMBERS}{body}"));
        let mut memory = bytes_of(&[0; 256]);
        launch(&text, &mut memory, &shape(16, 1, seed)).map_err(|finding| finding.kind)?;
        Ok::<_, Kind>(words_of(&memory)[..3].to_vec())
    };
    let writes = "\tst.global.u32 [%rd0], 9;\n\tst.global.u32 [%rd0+8], 7;\n";
    for seed in 0..12 {
        assert_eq!(of(writes, seed), Ok(vec![9, 48, 7]));
    }
    // The first to come to it knows of no other.
    let body = format!(
        "\tld.global.u32 %r9, [%rd0+8];\n{COUNT}{FENCE}\tsetp.eq.u32 %p1, %r4, 7;\n\t@%p1 st.global.u32 [%rd0+8], 7;\n"
    );
    races(16, 1, &body);
}

#[test]
fn only_blocks_that_touched_a_byte_need_to_be_known() {
    // Two groups of two blocks, each with a counter, which the last of a group resets.
    let group = "\tshr.u32 %r5, %r2, 1;\n\tmul.wide.u32 %rd2, %r5, 4;\n\tadd.s64 %rd2, %rd0, %rd2;\n\tsetp.eq.u32 %p1, %r4, 1;\n";
    let count = COUNT.replace("[%rd0]", "[%rd2]");
    let (before, last) = group.split_at(group.find("\tsetp").expect("it has one"));
    let body = |resets: &str, read: &str| {
        format!("{before}{read}{FENCE}{count}{FENCE}{last}\t@%p1 st.global.u32 {resets}, 0;\n")
    };
    is_ordered(4, 1, &body("[%rd2]", ""));
    // What both blocks of a group read.
    let read = "\tld.global.u32 %r9, [%rd2+64];\n";
    is_ordered(4, 1, &body("[%rd2+64]", read));
    // What all four read.
    let read = "\tld.global.u32 %r9, [%rd0+64];\n";
    races(4, 1, &body("[%rd0+64]", read));
}

#[test]
fn a_strong_access_does_not_hide_a_weak_one_before_it() {
    let first = "\tsetp.eq.u32 %p1, %r0, 0;\n";
    let add = "red.global.add.u32 [%rd0], 1;\n";
    races(
        4,
        1,
        &format!("{first}\t@%p1 st.global.u32 [%rd0], 0;\n\t{add}"),
    );
    let reads =
        "\t@%p1 ld.global.u32 %r4, [%rd0];\n\t@%p1 ld.relaxed.gpu.global.u32 %r5, [%rd0];\n";
    races(4, 1, &format!("{first}{reads}\t@!%p1 {add}"));
    is_ordered(
        4,
        1,
        &format!("{first}{reads}\t@!%p1 {add}").replace("ld.global", "ld.volatile.global"),
    );
}

#[test]
fn a_race_names_both_sides() {
    let body = "\t.loc 1 7 1\n\tst.global.u32 [%rd0], %r0;\n";
    let text = format!(
        "{}\t.file\t1 \"/a/folder/sample.cu\"\n",
        kernel("", &format!("{NUMBERS}{body}"))
    );
    let of = |shape| -> Finding {
        launch(&text, &mut bytes_of(&[0; 16]), &shape).expect_err("all write one word")
    };
    let finding = of(shape(1, 2, 0));
    let message = &finding.message;
    assert!(
        message.contains("wrote 4 bytes at 0x100000, thread ("),
        "{message}"
    );
    assert!(
        message
            .contains(") of block (0, 0, 0) wrote some of them at sample.cu:7, and no barrier is"),
        "{message}"
    );
    assert_eq!(
        finding.access.as_deref(),
        Some(&(START..START + 4, "wrote"))
    );
    let message = of(shape(2, 1, 0)).message;
    assert!(
        message.ends_with("and nothing orders the blocks of a launch"),
        "{message}"
    );
}
