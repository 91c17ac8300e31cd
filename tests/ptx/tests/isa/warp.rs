//! Instructions of a warp: divergence, shuffles, votes, matrices.

use ddp_ptx::Kind;

use crate::machine::per_thread;

const STORE: &str = "\tst.global.u32 [%rd1], %r9;\n";

fn run(body: &str, words: &[u32]) -> Vec<u32> {
    per_thread(32, "", &format!("{body}{STORE}"), words)
        .unwrap_or_else(|finding| panic!("{finding}"))
}

#[test]
fn lanes_that_part_meet_again() {
    // Each lane counts to its own number, then all shuffle together.
    let body = "\tmov.u32 %r9, 0;\n\tsetp.eq.u32 %p1, %r0, 0;\n\t@%p1 bra DONE;\nLOOP:\n\tadd.u32 %r9, %r9, 3;\n\tsub.u32 %r1, %r0, 1;\n\
                \tmov.u32 %r0, %r1;\n\tsetp.ne.u32 %p1, %r0, 0;\n\t@%p1 bra LOOP;\nDONE:\n\tshfl.sync.bfly.b32 %r9|%p2, %r9, 31, 31, -1;\n";
    let expected: Vec<u32> = (0..32).map(|lane| (31 - lane) * 3).collect();
    assert_eq!(run(body, &[0; 32]), expected);
}

#[test]
fn guards_leave_other_lanes_as_they_are() {
    let body = "\tmov.u32 %r9, 7;\n\tand.b32 %r1, %r0, 1;\n\tsetp.eq.u32 %p1, %r1, 1;\n\t@%p1 mov.u32 %r9, 8;\n\t@!%p1 add.u32 %r9, %r9, %r0;\n";
    let expected: Vec<u32> = (0..32)
        .map(|lane| if lane % 2 == 1 { 8 } else { 7 + lane })
        .collect();
    assert_eq!(run(body, &[0; 32]), expected);
}

#[test]
fn shuffles_read_the_lane_that_the_isa_says() {
    let of = |operands: &str| {
        let body =
            format!("\tmov.u32 %r9, 0;\n\tshfl.sync.{operands};\n\t@!%p1 add.u32 %r9, %r9, 100;\n");
        run(&body, &[0; 32])
    };
    let expected = |from: &dyn Fn(u32) -> (u32, bool)| -> Vec<u32> {
        (0..32)
            .map(|lane| match from(lane) {
                (from, true) => from,
                // Outside of the segment a lane reads itself.
                (_, false) => lane + 100,
            })
            .collect()
    };
    assert_eq!(
        of("up.b32 %r9|%p1, %r0, 3, 0, -1"),
        expected(&|lane| (lane.wrapping_sub(3), lane >= 3))
    );
    assert_eq!(
        of("down.b32 %r9|%p1, %r0, 3, 31, -1"),
        expected(&|lane| (lane + 3, lane + 3 < 32))
    );
    assert_eq!(
        of("bfly.b32 %r9|%p1, %r0, 16, 31, -1"),
        expected(&|lane| (lane ^ 16, true))
    );
    assert_eq!(
        of("idx.b32 %r9|%p1, %r0, 5, 31, -1"),
        expected(&|_| (5, true))
    );
    // Segments of 8 lanes: the mask of the segment is 24, the clamp 7.
    assert_eq!(
        of("down.b32 %r9|%p1, %r0, 3, 0x1807, -1"),
        expected(&|lane| (lane + 3, lane % 8 + 3 < 8))
    );
    assert_eq!(
        of("idx.b32 %r9|%p1, %r0, 5, 0x1807, -1"),
        expected(&|lane| (lane / 8 * 8 + 5, true))
    );
    assert_eq!(
        of("up.b32 %r9|%p1, %r0, 3, 0x1800, -1"),
        expected(&|lane| (lane.wrapping_sub(3), lane % 8 >= 3))
    );
}

#[test]
fn votes_and_matches_are_of_the_members() {
    let third = "\trem.u32 %r1, %r0, 3;\n\tsetp.eq.u32 %p1, %r1, 0;\n";
    let thirds = (0..32)
        .filter(|lane| lane % 3 == 0)
        .fold(0u32, |all, lane| all | 1 << lane);
    let one = |body: &str| run(&format!("{third}{body}"), &[0; 32])[0];
    assert_eq!(one("\tvote.sync.ballot.b32 %r9, %p1, -1;\n"), thirds);
    assert_eq!(one("\tvote.sync.ballot.b32 %r9, !%p1, -1;\n"), !thirds);
    let as_word = "\tselp.u32 %r9, 1, 0, %p2;\n";
    assert_eq!(
        one(&format!("\tvote.sync.any.pred %p2, %p1, -1;\n{as_word}")),
        1
    );
    assert_eq!(
        one(&format!("\tvote.sync.all.pred %p2, %p1, -1;\n{as_word}")),
        0
    );
    assert_eq!(
        one(&format!("\tvote.sync.uni.pred %p2, %p1, -1;\n{as_word}")),
        0
    );
    assert_eq!(one("\tmatch.any.sync.b32 %r9, %r1, -1;\n"), thirds);
    assert_eq!(one("\tmatch.all.sync.b32 %r9|%p2, %r1, -1;\n"), 0);
    assert_eq!(
        one(&format!("\tmatch.all.sync.b64 %r9|%p2, 7, -1;\n{as_word}")),
        1
    );
    // Of lanes that branched together.
    let half = "\tsetp.lt.u32 %p1, %r0, 16;\n\tmov.u32 %r9, 0;\n\t@!%p1 bra AWAY;\n\tactivemask.b32 %r9;\nAWAY:\n";
    assert_eq!(
        run(half, &[0; 32])[..17],
        [[0xffffu32; 16].as_slice(), &[0]].concat()
    );
}

#[test]
fn lanes_wait_for_the_members_that_come_later() {
    // Lanes of the lower half come to the shuffle by another path than those of the upper half.
    let body = "\tsetp.lt.u32 %p1, %r0, 16;\n\tmov.u32 %r1, %r0;\n\t@%p1 bra MEET;\n\tadd.u32 %r1, %r1, 100;\n\tbra MEET;\n\tmov.u32 %r1, 0;\nMEET:\n\
                \tshfl.sync.bfly.b32 %r9|%p2, %r1, 16, 31, -1;\n";
    let expected: Vec<u32> = (0..32)
        .map(|lane| if lane < 16 { lane + 116 } else { lane - 16 })
        .collect();
    assert_eq!(run(body, &[0; 32]), expected);
}

#[test]
fn a_member_that_never_comes_is_found() {
    let body = "\tsetp.lt.u32 %p1, %r0, 16;\n\t@%p1 shfl.sync.bfly.b32 %r9|%p2, %r0, 1, 31, -1;\n\tbar.sync 0;\n";
    let finding = per_thread(32, "", body, &[0; 32]).expect_err("half of the warp is missing");
    assert_eq!(finding.kind, Kind::Warp, "{finding}");
    let body = "\tsetp.lt.u32 %p1, %r0, 16;\n\t@%p1 vote.sync.ballot.b32 %r9, %p1, 0xff00ff;\n";
    let finding = per_thread(32, "", body, &[0; 32]).expect_err("lanes that are no members");
    assert!(
        finding.kind == Kind::Warp && finding.message.contains("not among the members"),
        "{finding}"
    );
    // Those that have returned are not waited for.
    let body = "\tsetp.ge.u32 %p1, %r0, 16;\n\t@%p1 exit;\n\tvote.sync.ballot.b32 %r9, %p1, -1;\n\tst.global.u32 [%rd1], %r9;\n";
    let found = per_thread(32, "", body, &[5; 32]).unwrap_or_else(|finding| panic!("{finding}"));
    assert_eq!((found[0], found[31]), (0, 5));
}

/// The 8 × 8 halves that `ldmatrix` of one matrix gives, by row and column.
fn matrix(is_transposed: bool) -> Vec<Vec<u32>> {
    let trans = if is_transposed { ".trans" } else { "" };
    // Half `c` of row `r` is 8·r + c. Lanes write four halves each with the first 16 of them.
    let body = format!(
        "\tmov.u32 %r1, tile;\n\tshl.b32 %r2, %r0, 2;\n\tadd.u32 %r3, %r1, %r2;\n\tshl.b32 %r4, %r0, 1;\n\tadd.u32 %r5, %r4, 1;\n\
         \tshl.b32 %r5, %r5, 16;\n\tor.b32 %r5, %r5, %r4;\n\tst.shared.u32 [%r3], %r5;\n\tbar.warp.sync -1;\n\
         \tand.b32 %r6, %r0, 7;\n\tshl.b32 %r6, %r6, 4;\n\tadd.u32 %r6, %r1, %r6;\n\
         \tldmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 {{%r9}}, [%r6];\n\tst.global.u32 [%rd1], %r9;\n"
    );
    let found = per_thread(32, "\t.shared .align 16 .b8 tile[128];\n", &body, &[0; 32])
        .unwrap_or_else(|finding| panic!("{finding}"));
    (0..8)
        .map(|row| {
            (0..8)
                .map(|column| found[row * 4 + column / 2] >> (column % 2 * 16) & 0xffff)
                .collect()
        })
        .collect()
}

#[test]
fn matrices_are_loaded_by_rows_or_columns() {
    let (straight, transposed) = (matrix(false), matrix(true));
    for row in 0..8 {
        for column in 0..8 {
            assert_eq!(straight[row][column], (row * 8 + column) as u32);
            assert_eq!(transposed[row][column], (column * 8 + row) as u32);
        }
    }
}

/// Halves of bf16 for small integers.
fn bf16(value: f32) -> u32 {
    value.to_bits() >> 16
}

#[test]
fn matrices_are_multiplied_where_the_isa_says_their_elements_are() {
    let a = |row: usize, k: usize| ((row * 5 + k * 3) % 7) as f32 - 3.0;
    let b = |k: usize, column: usize| ((k * 2 + column) % 5) as f32 - 2.0;
    let c = |row: usize, column: usize| (row * 8 + column) as f32;
    // By lane, as in the figures for m16n8k16: 4 words of A, 2 of B, 4 of C.
    let mut words = vec![0; 32 * 10];
    for lane in 0..32 {
        let (group, pair) = (lane / 4, lane % 4 * 2);
        for index in 0..8 {
            let row = if index < 2 || (4..6).contains(&index) {
                group
            } else {
                group + 8
            };
            let k = pair + index % 2 + if index < 4 { 0 } else { 8 };
            words[index / 2 * 32 + lane] |= bf16(a(row, k)) << (index % 2 * 16);
        }
        for index in 0..4 {
            let k = pair + index % 2 + if index < 2 { 0 } else { 8 };
            words[(4 + index / 2) * 32 + lane] |= bf16(b(k, group)) << (index % 2 * 16);
            let row = if index < 2 { group } else { group + 8 };
            words[(6 + index) * 32 + lane] = c(row, pair + index % 2).to_bits();
        }
    }
    let mut body = String::new();
    for register in 0..10 {
        body += &format!(
            "\tld.global.u32 %r{}, [%rd1+{}];\n",
            register + 10,
            register * 128
        );
    }
    body += "\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r20, %r21, %r22, %r23}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r16, %r17, %r18, %r19};\n";
    for register in 0..4 {
        body += &format!(
            "\tst.global.u32 [%rd1+{}], %r{};\n",
            register * 128,
            register + 20
        );
    }
    let found = per_thread(32, "", &body, &words).unwrap_or_else(|finding| panic!("{finding}"));
    for lane in 0..32 {
        for index in 0..4 {
            let (row, column) = (lane / 4 + index / 2 * 8, lane % 4 * 2 + index % 2);
            let expected = c(row, column) + (0..16).map(|k| a(row, k) * b(k, column)).sum::<f32>();
            assert_eq!(
                f32::from_bits(found[index * 32 + lane]),
                expected,
                "row {row}, column {column}"
            );
        }
    }
    let alone = body.replace("\tmma", "\tsetp.lt.u32 %p1, %r0, 16;\n\t@%p1 mma");
    let finding = per_thread(32, "", &alone, &words).expect_err("half of the warp is missing");
    assert_eq!(finding.kind, Kind::Warp, "{finding}");
}
