//! Shards of ours: what is written is read, and what is not whole is refused.

use super::*;
use crate::disk::testing::Scratch;

fn about(vocabulary: usize, end_of_text: Option<usize>) -> ShardAbout {
    ShardAbout {
        vocabulary,
        end_of_text,
        ..ShardAbout::default()
    }
}

#[test]
fn a_shard_reads_back_in_the_narrowest_type() {
    let scratch = Scratch::new();
    for (vocabulary, element, end) in [
        (1 << 16, Element::U16, Some(7)),
        ((1 << 16) + 1, Element::U32, None),
    ] {
        let path = scratch.path().join("shard.bin");
        let last = vocabulary as u32 - 1;
        write_shard(&path, about(vocabulary, end), |shard| {
            shard.write(&[3, 7])?;
            shard.write(&[last, 0, 1])
        })
        .unwrap();
        assert!(says_tokens(&path));
        let (array, coding) = open(&path, false, None).unwrap();
        let mut tokens = [0; 5];
        array.read_i64(0, &mut tokens).unwrap();
        assert_eq!((array.element(), array.rows()), (element, 5));
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
    let error = write_shard(&path, about(10, None), |shard| {
        shard.write(&[9, 1])?;
        shard.write(&[10])
    });
    let text = error.unwrap_err().to_string();
    assert!(
        text.contains("below the vocabulary of 10, got 10"),
        "{text}"
    );
    assert!(scratch.names().is_empty(), "{:?}", scratch.names());
    let error = write_shard(&path, about(10, Some(10)), |shard| shard.write(&[1]));
    error.and_then(|()| open(&path, false, None)).unwrap_err();
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
        open(&path, false, None).map(|(array, _)| array.rows())
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
    let opened = |bytes: Vec<u8>| {
        fs::write(&path, bytes).unwrap();
        open(&path, true, None).map(|(array, _)| array.rows())
    };
    let error = opened((0..100u32).flat_map(u32::to_le_bytes).collect()).unwrap_err();
    assert_eq!(error.exit_code(), 65);
    let text = error.to_string();
    assert!(
        text.contains("every second one is 0, as in u32 tokens"),
        "{text}"
    );
    assert_eq!(
        opened((0..100u16).flat_map(u16::to_le_bytes).collect()).unwrap(),
        100
    );
    assert_eq!(opened(vec![0; 200]).unwrap(), 100);
}
