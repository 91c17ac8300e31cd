//! Several launches: what is kept between them, and what they do to memory.

use super::*;

#[test]
fn launches_are_ordered_and_share_what_is_kept() {
    let text = kernel("", &format!("{NUMBERS}\tst.global.u32 [%rd1], %r0;\n"));
    let back = kernel(
        "",
        &format!(
            "{NUMBERS}\txor.b32 %r4, %r0, 3;\n\tmul.wide.u32 %rd2, %r4, 4;\n\tadd.s64 %rd2, %rd0, %rd2;\n\tld.global.u32 %r5, [%rd2];\n\tst.global.u32 [%rd1+256], %r5;\n"
        ),
    );
    let wrong = kernel("", "\tst.global.u32 [%rd0+4], 1;\n");
    let (mut memory, mut shadows) = (bytes_of(&[0; 128]), Shadows::default());
    for seed in 0..8 {
        let shape = shape(2, 32, seed);
        for text in [&text, &back] {
            let outcome = run(text, &mut memory, &shape, &mut shadows);
            assert!(outcome.result.is_ok());
            let count = |ranges: &[std::ops::Range<u64>]| {
                ranges
                    .iter()
                    .map(|range| range.end - range.start)
                    .sum::<u64>()
            };
            // Marks of the launch before are gone.
            assert_eq!(count(&outcome.touched.writes), 256);
        }
        let outcome = run(&wrong, &mut memory, &shape, &mut shadows);
        assert_eq!(
            outcome.result.map_err(|finding| finding.kind).err(),
            Some(Kind::Race)
        );
    }
}

#[test]
fn memory_that_nothing_wrote_is_found_when_it_is_read() {
    let of = |body: &str| {
        let mut memory = bytes_of(&[0; 64]);
        let memory = Memory::new(&mut memory, Some(16..24));
        let text = kernel("", &format!("{NUMBERS}{body}"));
        let outcome = run_on(&text, &memory, &shape(1, 4, 0), &mut Shadows::default());
        assert!(outcome.result.is_ok());
        let found = outcome.unwritten?;
        assert_eq!(found.kind, Kind::NeverWritten);
        found.access.map(|access| *access)
    };
    let found = START + 16..START + 20;
    assert_eq!(of("\tld.global.u32 %r4, [%rd1];\n"), None);
    assert_eq!(
        of("\tld.global.u32 %r4, [%rd1+4];\n"),
        Some((found.clone(), "read"))
    );
    assert_eq!(
        of("\tld.global.u8 %r4, [%rd0+15];\n\tld.global.u8 %r4, [%rd0+24];\n"),
        None
    );
    // The launch itself may write it first.
    assert_eq!(
        of("\tst.global.u32 [%rd1+4], 1;\n\tld.global.u32 %r4, [%rd1+4];\n"),
        None
    );
    let half = "\tst.global.u16 [%rd1+4], 1;\n\tld.global.u32 %r4, [%rd1+4];\n";
    assert_eq!(of(half), Some((found.clone(), "read")));
    let adds = "\tred.global.add.u32 [%rd0+16], 1;\n";
    assert_eq!(of(adds), Some((found, "updated (atomic)")));
    let copy = "\tcp.async.ca.shared.global [tile], [%rd0+16], 4;\n\tcp.async.wait_all;\n";
    let body = format!(
        "\t.shared .align 16 .b8 tile[16];\n\tsetp.ne.u32 %p1, %r1, 0;\n\t@%p1 ret;\n{copy}"
    );
    assert!(of(&body).is_some());
}

#[test]
fn two_pointers_may_lead_to_the_same_bytes() {
    let with_two = |body: &str| {
        let text = kernel(
            "",
            &format!("\tld.param.u64 %rd5, [k_param_1];\n{NUMBERS}{body}"),
        );
        text.replace("k_param_0\n)", "k_param_0,\n\t.param .u64 k_param_1\n)")
    };
    let of = |body: &str| {
        launch(&with_two(body), &mut bytes_of(&[0; 64]), &shape(1, 2, 1)).map_err(|it| it.kind)
    };
    let odd = "\tsetp.eq.u32 %p1, %r1, 1;\n";
    let both = format!("{odd}\t@%p1 st.global.u32 [%rd0], 1;\n\t@!%p1 st.global.u32 [%rd5], 1;\n");
    assert_eq!(of(&both), Err(Kind::Race));
    let apart = both.replace("[%rd5]", "[%rd5+4]");
    assert_eq!(of(&apart), Ok(()));
    // Through the read-only path by one, and written by the other, in any order.
    let read = "\t@%p1 ld.global.nc.u32 %r4, [%rd0+8];\n";
    let write = "\t@!%p1 st.global.u16 [%rd5+10], 1;\n";
    for (first, second) in [(read, write), (write, read)] {
        let stale = format!("{odd}{first}\tbar.sync 0;\n{second}");
        assert_eq!(of(&stale), Err(Kind::ReadOnly));
        assert_eq!(of(&stale.replace(".nc", "")), Ok(()));
        assert_eq!(of(&stale.replace("[%rd5+10]", "[%rd5+12]")), Ok(()));
    }
    // What one leads to ends where it ends.
    assert_eq!(
        of("\tst.global.u32 [%rd5+256], 1;\n"),
        Err(Kind::OutOfBounds)
    );
}

#[test]
fn a_copy_reads_its_source_until_it_arrives() {
    let copy = |between: &str, after: &str| {
        format!(
            "\t.shared .align 16 .b8 tile[16];\n\tsetp.eq.u32 %p1, %r1, 0;\n\t@%p1 cp.async.ca.shared.global [tile], [%rd0], 16;\n\
             {between}\t@%p1 cp.async.wait_all;\n{after}"
        )
    };
    let write = "\tsetp.eq.u32 %p2, %r1, 32;\n\t@%p2 st.global.u32 [%rd0+8], 1;\n";
    is_ordered(1, 64, &copy("", &format!("\tbar.sync 0;\n{write}")));
    races(1, 64, &copy("", write));
    races(1, 64, &copy(&format!("\tbar.sync 0;\n{write}"), ""));
    is_ordered(1, 64, &copy("", &write.replace("+8", "+16")));
    // It reads half of the bytes that it writes, where every other access has 16.
    let half = |write: &str| copy("", write).replace("[%rd0], 16;\n", "[%rd0], 16, %r4;\n");
    let write =
        "\tsetp.eq.u32 %p2, %r1, 32;\n\t@%p2 st.global.v4.u32 [%rd0], {%r1, %r1, %r1, %r1};\n";
    let body = format!("\tmov.u32 %r4, 8;\n{}", half(write));
    races(1, 64, &body);
    is_ordered(1, 64, &body.replace("v4.u32 [%rd0]", "v4.u32 [%rd0+16]"));
}

#[test]
fn accesses_beyond_a_number_are_not_compared() {
    let text = kernel(
        "",
        &format!("{NUMBERS}\tst.global.u32 [%rd1+64], 1;\n\tst.global.u32 [%rd0], 1;\n"),
    );
    let module = ddp_ptx::Module::parse(&text).expect("it is PTX");
    let k = module
        .kernel("k")
        .and_then(Result::ok)
        .expect("it is simulated");
    let of = |compared_max| {
        let mut memory = bytes_of(&[0; 64]);
        let launch = Launch {
            arguments: vec![START.to_le_bytes().to_vec()],
            compared_max,
            ..shape(1, 16, 0)
        };
        k.run(
            &launch,
            &Memory::new(&mut memory, None),
            &mut Shadows::default(),
        )
        .result
        .is_ok()
    };
    assert_eq!([of(0), of(16), of(u64::MAX)], [true, true, false]);
}

#[test]
fn kernels_that_hold_pointers_are_known() {
    let holds = |body: &str| {
        let text =
            kernel("", body).replace("k_param_0\n)", "k_param_0,\n\t.param .u64 k_param_1\n)");
        let module = ddp_ptx::Module::parse(&text).expect("it is PTX");
        module
            .kernel("k")
            .and_then(Result::ok)
            .expect("it is simulated")
            .holds_pointers()
    };
    let two = "\tld.param.u64 %rd5, [k_param_1];\n\tcvta.to.global.u64 %rd6, %rd0;\n";
    // An index, a size, and an index that was loaded.
    assert!(!holds(&format!(
        "{two}\tshl.b64 %rd7, %rd5, 2;\n\tadd.s64 %rd8, %rd6, %rd7;\n\tst.global.u64 [%rd8], %rd5;\n"
    )));
    assert!(!holds(&format!(
        "{two}\tld.global.u64 %rd7, [%rd6];\n\tshl.b64 %rd7, %rd7, 3;\n\tadd.s64 %rd8, %rd6, %rd7;\n\tst.global.u32 [%rd8], 1;\n"
    )));
    // Pointers that are stored, followed and compared.
    assert!(holds(&format!(
        "{two}\tadd.s64 %rd8, %rd6, 16;\n\tst.global.u64 [%rd6], %rd8;\n"
    )));
    assert!(holds(&format!(
        "{two}\tld.global.u64 %rd7, [%rd6];\n\tld.u32 %r1, [%rd7+4];\n"
    )));
    assert!(holds(&format!(
        "{two}\tst.global.u32 [%rd5], 1;\n\tld.global.u64 %rd7, [%rd6];\n\tsetp.eq.s64 %p1, %rd7, %rd5;\n"
    )));
}
