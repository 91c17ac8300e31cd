//! The claims of headers are compared with the size of the file.

use super::*;

#[test]
fn claims_of_npy_headers_are_compared_with_the_file() {
    let scratch = Scratch::new();
    let npy = |descr, shape, bytes| made::npy(descr, false, shape, bytes);
    for (descr, shape, why) in [
        (
            "<f4",
            "(1000000000, 1000000000)",
            "claims f32[1000000000, 1000000000] = 4000000000000000128 bytes",
        ),
        (
            "<f4",
            "(4294967296, 4294967296)",
            "more elements than this machine can address",
        ),
        ("<f4", "(-1, 3)", "invalid value: integer `-1`"),
        ("<f4", "(3, 0)", "claims f32[3, 0] = 128 bytes"),
        ("<f4", "()", "claims f32[] = 132 bytes"),
        (
            "<f4",
            "(2, 1)",
            "claims f32[2, 1] = 136 bytes with the header, but it has 140",
        ),
        ("<f8", "(3,)", "claims f64[3] = 152 bytes"),
        ("<c8", "(3,)", "got dtype '<c8'; help"),
        ("<M8[ns]", "(3,)", "got dtype '<M8[ns]'; help"),
        ("|V2", "(3,)", "bfloat16 and times as numbers"),
        (
            "<f16",
            "(3,)",
            "expected bool, integers of 1 to 8 bytes or floats of 2 to 8 bytes, got dtype '<f16'",
        ),
        ("|f4", "(3,)", "expected < or >, got |"),
    ] {
        let text = refused(&file(&scratch, "a.npy", &npy(descr, shape, 12)));
        assert!(text.contains(why), "{text}\n  lacks: {why}");
    }
    assert!(
        refused(&file(&scratch, "a.npy", &npy("<f4", "(3, 0)", 0)))
            .contains("it is empty: its shape is [3, 0]")
    );
    // A byte of a bool that is neither.
    let path = file(
        &scratch,
        "a.npy",
        &[&npy("|b1", "(2, 2)", 3)[..], &[7]].concat(),
    );
    let error = open(&path, None).unwrap().arrays[0]
        .read_f32(1, &mut [0.0; 2])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("row 1, number 1: expected a bool (0 or 1), got 7"),
        "{error}"
    );
}

#[test]
fn claims_of_idx_headers_are_compared_with_the_file() {
    let scratch = Scratch::new();
    for (header, why) in [
        (
            &[0, 0, 8, 2, 0, 0, 0, 3, 0, 0, 0, 5][..],
            "claims u8[3, 5], 27 bytes with the header, but the file has 18",
        ),
        (
            &[0, 0, 8, 1, 255, 255, 255, 255],
            "claims u8[4294967295], 4294967303 bytes",
        ),
        (
            &[
                0, 0, 14, 3, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255,
            ],
            "more than 2^64 bytes",
        ),
        (
            &[0, 0, 8, 2, 0, 0, 0, 0, 0, 0, 0, 5, 0],
            "claims u8[0, 5], 12 bytes",
        ),
        (
            &[0, 0, 10, 1, 0, 0, 0, 6],
            "its type: expected 0x08, 0x09, 0x0b, 0x0c, 0x0d or 0x0e, got 0x0a",
        ),
        (&[0, 0, 8, 0], "expected 1 to 8 dimensions, got 0"),
        (&[0, 0, 8, 9], "expected 1 to 8 dimensions, got 9"),
        (&[0, 1, 8, 1, 0, 0, 0, 6], "expected two zero bytes"),
    ] {
        let bytes = [header, &[1; 6]].concat();
        let text = refused(&file(&scratch, "a-idx2-ubyte", &bytes));
        assert!(text.contains(why), "{text}\n  lacks: {why}");
    }
    assert!(
        refused(&file(
            &scratch,
            "a.idx",
            &[0, 0, 8, 2, 0, 0, 0, 0, 0, 0, 0, 5]
        ))
        .contains("it is empty")
    );
    for length in 1..8 {
        assert!(
            refused(&file(
                &scratch,
                "a.idx",
                &[0, 0, 8, 1, 0, 0, 0, 0][..length]
            ))
            .contains("ends within its header")
        );
    }
}

#[test]
fn claims_of_safetensors_headers_are_compared_with_the_file() {
    let scratch = Scratch::new();
    let tensor = |dtype: &str, shape: &str, start: u64, end: u64| {
        format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#)
    };
    for (tensor, why) in [
        (tensor("F32", "[3]", 0, 16), "its header is damaged"),
        (
            tensor("F32", "[4]", 0, 16),
            "its tensors take 16 bytes, but it has 12",
        ),
        (tensor("F32", "[3]", 4, 16), "its header is damaged"),
        (
            tensor("F32", "[4294967296,4294967296,4294967296]", 0, 12),
            "its header is damaged",
        ),
        (tensor("F32", "[-3]", 0, 12), "its header is damaged"),
        (
            tensor("F32", "[3,0]", 0, 0),
            "its tensors take 0 bytes, but it has 12",
        ),
        (tensor("F128", "[3]", 0, 12), "unknown variant `F128`"),
        (tensor("F8_E4M3", "[12]", 0, 12), "elements of type F8_E4M3"),
        (
            tensor("F32", "[3,1,1,1,1,1,1,1,1]", 0, 12),
            "has too many dimensions or elements",
        ),
    ] {
        let bytes = made::safetensors(&format!(r#"{{"x":{tensor}}}"#), 12);
        let text = refused(&file(&scratch, "a.safetensors", &bytes));
        assert!(text.contains(why), "{text}\n  lacks: {why}");
    }
    let bytes = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
    assert!(refused(&file(&scratch, "a.safetensors", &bytes)).contains("got 18446744073709551615"));
}
