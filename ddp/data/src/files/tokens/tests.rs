//! Our shards: they read back as written, and incomplete ones are refused.

use super::*;
use crate::files::{RowKind, open_tokens, row_kind};
use ddp_kernels::files::testing::Scratch;

fn about(vocabulary: usize, end_of_text: Option<usize>) -> About {
    About {
        vocabulary: Some(vocabulary),
        end_of_text,
        ..About::default()
    }
}

#[test]
fn a_shard_reads_back_in_the_narrowest_type() {
    let scratch = Scratch::new();
    for (vocabulary, element, end) in [
        (1 << 16, NumberType::U16, Some(7)),
        ((1 << 16) + 1, NumberType::U32, None),
    ] {
        let path = scratch.path().join("shard.bin");
        let last = vocabulary as u32 - 1;
        let parts = [&[3, 7][..], &[last, 0, 1]];
        write_shard(&path, about(vocabulary, end), &parts).unwrap();
        assert_eq!(row_kind(&path, false).unwrap(), RowKind::Tokens);
        let TokenFile {
            tokens: array,
            coding,
        } = open_tokens(&path, None, None).unwrap();
        let mut tokens = [0; 5];
        array.read_i64(0, &mut tokens).unwrap();
        assert_eq!((array.element, array.rows()), (element, 5));
        assert_eq!(tokens, [3, 7, i64::from(last), 0, 1]);
        assert_eq!(
            (coding.vocabulary, coding.end_of_text),
            (Some(vocabulary), end)
        );
    }
}

#[test]
fn a_shard_that_is_not_finished_leaves_nothing() {
    let scratch = Scratch::new();
    let path = scratch.path().join("shard.bin");
    let error = write_shard(&path, about(10, None), &[&[9, 1][..], &[10]]);
    let text = error.unwrap_err().to_string();
    assert!(
        text.contains("below the vocabulary of 10, got 10"),
        "{text}"
    );
    assert!(scratch.names().is_empty(), "{:?}", scratch.names());
    let error = write_shard(&path, about(10, Some(10)), &[[1]]);
    error
        .and_then(|()| open_tokens(&path, None, None))
        .unwrap_err();
}

#[test]
fn a_header_of_llm_c_is_no_gpt_2_tokens() {
    // So a file without a header that begins like one is not possible.
    for magic in [20240520u32, 20240801] {
        let first = u16::from_le_bytes(*magic.to_le_bytes().first_chunk().unwrap());
        assert!(first >= 50_257, "{first}");
    }
}

#[test]
fn whatever_a_header_of_llm_c_says_is_compared_with_the_file() {
    let scratch = Scratch::new();
    let path = scratch.path().join("train.bin");
    let header = [20240801u32, 7, 5].map(u32::to_le_bytes);
    let mut whole = header.as_flattened().to_vec();
    whole.resize(1024 + 5 * 4, 0);
    let opened = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        open_tokens(&path, None, None).map(|file| file.tokens.rows())
    };
    assert_eq!(opened(&whole).unwrap(), 5);
    for length in (0..1024).step_by(31).chain(1024..whole.len()) {
        let error = opened(&whole[..length]).unwrap_err();
        assert_eq!(error.exit_code(), 65, "{length}: {error}");
    }
    for byte in 0..12 {
        for flipped in [1, 0x80, 0xff] {
            let mut damaged = whole.clone();
            damaged[byte] ^= flipped;
            let error = opened(&damaged).unwrap_err();
            assert_eq!(error.exit_code(), 65, "byte {byte}: {error}");
        }
    }
}

#[test]
fn u32_tokens_are_not_read_as_u16() {
    let scratch = Scratch::new();
    let path = scratch.path().join("train.bin");
    let opened = |token_type, bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let file = open_tokens(&path, token_type, None);
        file.map(|TokenFile { tokens, .. }| (tokens.element, tokens.rows()))
    };
    let wide = |tokens: &[u32]| {
        tokens
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect()
    };
    let narrow = |tokens: &[u16]| {
        tokens
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect()
    };
    // Tokens of all sizes below a vocabulary, some of them often.
    let some = |below: u64| -> Vec<u32> {
        let token = |index: u64| match index % 5 {
            0 => index % 50,
            _ => ((index * 2_654_435_761) >> 7) % below,
        };
        (0..3000).map(|index| token(index) as u32).collect()
    };
    let longs: Vec<u32> = some(300).into_iter().flat_map(|token| [token, 0]).collect();
    let i64s: Vec<u32> = some(66_000)
        .into_iter()
        .flat_map(|token| [token, 0])
        .collect();
    let cases: [Vec<u8>; 6] = [
        wide(&(0..100).collect::<Vec<_>>()),
        wide(&some(66_000)),
        wide(&some(128_256)),
        wide(&some(4_000_000)),
        wide(&longs),
        wide(&i64s),
    ];
    for (number, bytes) in cases.iter().enumerate() {
        let error = opened(None, bytes).unwrap_err();
        assert_eq!(error.exit_code(), 65);
        let text = error.to_string();
        assert!(
            text.contains("as in u32 tokens")
                && text.contains("type=u32")
                && text.contains("int64"),
            "{number}: {text}"
        );
        let count = bytes.len() as u64;
        let zeros = "every second one is below 1, as in u32 tokens or wider ones";
        // A stated type is wrong where every second number is 0.
        for (element, size, is_wrong) in [
            (NumberType::U32, 4, number >= 4),
            (NumberType::U16, 2, [0, 1, 4, 5].contains(&number)),
        ] {
            match opened(Some(element), bytes) {
                Ok(got) => assert!(!is_wrong && got == (element, count / size), "{number}"),
                Err(error) => assert!(is_wrong && error.to_string().contains(zeros), "{error}"),
            }
        }
    }
    // Tokens that are u16: of bytes, of GPT-2, all below 64, and zeros.
    for below in [256, 50_257, 64, 1] {
        let tokens: Vec<u16> = some(below).iter().map(|&token| token as u16).collect();
        let bytes: Vec<u8> = narrow(&tokens);
        assert_eq!(
            opened(None, &bytes).unwrap(),
            (NumberType::U16, 3000),
            "{below}"
        );
    }
}

#[test]
fn swapped_bytes_of_tokens_are_told_unless_a_header_names_their_order() {
    let scratch = Scratch::new();
    let path = scratch.path().join("train.bin");
    // Low numbers are frequent, as in the vocabularies that merging pairs makes.
    let tokens = |below: u64| {
        (0..3000u64).map(move |index| {
            let random = ((index * 2_654_435_761) >> 7) % 1000;
            (random * random * random * below / 1_000_000_000) as u32
        })
    };
    let opened = |stated, bytes: Vec<u8>| {
        fs::write(&path, bytes).unwrap();
        open_tokens(&path, stated, None)
    };
    for below in [64, 256, 1024, 32_000, 50_257] {
        let little = tokens(below).flat_map(|token| (token as u16).to_le_bytes());
        let big = || tokens(below).flat_map(|token| (token as u16).to_be_bytes());
        assert_eq!(opened(None, little.collect()).unwrap().tokens.rows(), 3000);
        for stated in [None, Some(NumberType::U16)] {
            let error = opened(stated, big().collect()).unwrap_err();
            assert_eq!(error.exit_code(), 65, "{below}");
            let text = error.to_string();
            assert!(
                text.contains("bytes seem to be swapped; help: "),
                "{below}: {text}"
            );
        }
    }
    for below in [66_000, 128_256, 4_000_000] {
        let little = tokens(below).flat_map(u32::to_le_bytes).collect();
        let file = opened(Some(NumberType::U32), little).unwrap();
        assert_eq!(file.tokens.rows(), 3000);
        let big = tokens(below).flat_map(u32::to_be_bytes).collect();
        let error = opened(Some(NumberType::U32), big).unwrap_err();
        assert!(error.to_string().contains("swapped"), "{error}");
    }
    // A cluster of high numbers, little-endian.
    let high = (0..3000u16).flat_map(|index| (64_000 + index % 101).to_le_bytes());
    assert_eq!(opened(None, high.collect()).unwrap().tokens.rows(), 3000);
    // The few that a file of separators begins with say nothing.
    let few = [50_256u16, 50_256, 11, 50_256].repeat(1000);
    let few = few.into_iter().flat_map(u16::to_le_bytes).collect();
    assert_eq!(opened(None, few).unwrap().tokens.rows(), 4000);
    // NumPy's files say in which order their bytes are.
    let mut header = String::from("{'descr': '>u2', 'fortran_order': False, 'shape': (3000,), }");
    header += &" ".repeat(117 - header.len());
    let start = [
        b"\x93NUMPY\x01\x00",
        &118u16.to_le_bytes()[..],
        header.as_bytes(),
        b"\n",
    ]
    .concat();
    let path = scratch.path().join("train.npy");
    let numbers = tokens(50_257).flat_map(|token| (token as u16).to_be_bytes());
    fs::write(&path, start.into_iter().chain(numbers).collect::<Vec<u8>>()).unwrap();
    let file = open_tokens(&path, None, None).unwrap();
    let mut read = vec![0; 3000];
    file.tokens.read_i64(0, &mut read).unwrap();
    assert!(read.into_iter().eq(tokens(50_257).map(i64::from)));
}

#[test]
fn a_header_of_another_format_of_llm_c_is_not_read_as_tokens() {
    let scratch = Scratch::new();
    let path = scratch.path().join("train.bin");
    let mut bytes = [20240522u32, 1, 500].map(u32::to_le_bytes).concat();
    bytes.resize(1024, 0);
    bytes.extend([7; 1000]);
    fs::write(&path, &bytes).unwrap();
    let part = "with the unknown magic number 20240522";
    let error = open_tokens(&path, None, None).unwrap_err().to_string();
    assert!(error.contains(part), "{error}");
    let stated = open_tokens(&path, Some(NumberType::U16), None).unwrap();
    assert_eq!(stated.tokens.rows(), 1012);
}

#[test]
fn a_text_in_utf_16_or_utf_32_is_refused() {
    let scratch = Scratch::new();
    let path = scratch.path().join("a.txt");
    // Spaces alone have zeros in UTF-16.
    let text: String = "Привет, как дела? ".repeat(9);
    for (is_wide, swap) in [(false, false), (false, true), (true, false), (true, true)] {
        for has_mark in [false, true] {
            let unit = |letter: char| match (is_wide, swap) {
                (true, false) => (letter as u32).to_le_bytes().to_vec(),
                (true, true) => (letter as u32).to_be_bytes().to_vec(),
                (false, false) => (letter as u16).to_le_bytes().to_vec(),
                (false, true) => (letter as u16).to_be_bytes().to_vec(),
            };
            let mark = if has_mark { "\u{feff}" } else { "" };
            let bytes: Vec<u8> = mark.chars().chain(text.chars()).flat_map(unit).collect();
            fs::write(&path, bytes).unwrap();
            let error = open_tokens(&path, None, None).unwrap_err();
            let got = match (has_mark, is_wide) {
                (false, _) => "got NUL bytes, as UTF-16 has",
                (true, true) => "got UTF-32;",
                (true, false) => "got UTF-16;",
            };
            assert!(
                error.exit_code() == 65 && error.to_string().contains(got),
                "{error}"
            );
        }
    }
    fs::write(&path, &text).unwrap();
    let opened = open_tokens(&path, None, None).unwrap();
    assert_eq!(opened.tokens.rows(), text.len() as u64);
}

#[test]
fn the_byte_order_mark_of_a_text_is_no_token() {
    let scratch = Scratch::new();
    let path = scratch.path().join("a.txt");
    fs::write(&path, "\u{feff}ab\u{feff}").unwrap();
    let array = open_tokens(&path, None, None).unwrap().tokens;
    let mut tokens = [0; 5];
    array.read_i64(0, &mut tokens).unwrap();
    assert_eq!((array.rows(), tokens), (5, [97, 98, 0xef, 0xbb, 0xbf]));
}
