//! Headers that claim false sizes are refused without allocating those sizes. Alone in its process,
//! because it counts every allocation of the process.

use std::io::Write;

use counting::take_largest_bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use made::{npy, safetensors};

#[allow(dead_code, unreachable_pub, reason = "fuzz targets call it too")]
#[path = "../fuzz/src/lib.rs"]
mod fuzzing;

#[path = "../../tests/counting.rs"]
mod counting;
#[path = "../data/src/files/tests/made.rs"]
mod made;

#[global_allocator]
static COUNTING: counting::Counting = counting::Counting;

/// Pieces and tables of the readers are smaller, and what the headers below claim is much larger.
const ALLOWED_BYTES: usize = 2 << 20;
/// A row of a table may have some million cells.
const ALLOWED_BYTES_OF_TABLES: usize = 64 << 20;

/// Refused, and with small allocations alone.
fn refused(ending: &str, bytes: &[u8], claim: &str) {
    let name = format!("a{ending}");
    take_largest_bytes();
    let (read, allowed) = match ending {
        ".bin" => (fuzzing::flat(bytes), ALLOWED_BYTES),
        ".csv" | ".csv.gz" => (fuzzing::table(&name, bytes), ALLOWED_BYTES_OF_TABLES),
        _ => (fuzzing::arrays(&name, bytes), ALLOWED_BYTES),
    };
    let largest = take_largest_bytes();
    assert!(
        read.is_err_and(|error| error.exit_code() == 65),
        "{ending} with {claim} was read"
    );
    assert!(
        largest <= allowed,
        "{ending} with {claim}: {largest} bytes at once"
    );
}

fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A golden file with these bytes at some places.
fn golden(name: &str, changes: &[(usize, &[u8])]) -> Vec<u8> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden/data")
        .join(name);
    let mut bytes = std::fs::read(path).unwrap();
    for (place, change) in changes {
        bytes[*place..place + change.len()].copy_from_slice(change);
    }
    bytes
}

// One test, since the count is of the whole process.
#[test]
fn what_a_header_claims_is_not_allocated() {
    for shape in [
        "(1000000000,)",
        "(100000, 100000)",
        "(1, 9000000000)",
        "(4294967296, 4294967296)",
    ] {
        for fortran_order in [false, true] {
            refused(".npy", &npy("<f4", fortran_order, shape, 64), shape);
        }
    }
    refused(
        ".npy",
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
        "a header of 4 GiB",
    );
    for dims in [[0x40, 0, 0, 0], [0xff, 0xff, 0xff, 0xff]] {
        for place in [4, 8, 12] {
            refused(
                "-idx3-ubyte",
                &golden("f64-idx3-ubyte", &[(place, &dims)]),
                "a large dimension",
            );
        }
    }
    for length in [u64::MAX, 1 << 40, 1 << 30, 1 << 24] {
        refused(
            ".safetensors",
            &golden("all.safetensors", &[(0, &length.to_le_bytes())]),
            "a long header",
        );
        refused(
            ".bin",
            &[
                &[0; 8][..],
                &64u64.to_le_bytes(),
                &length.to_le_bytes(),
                &[0; 200],
            ]
            .concat(),
            "a long header",
        );
    }
    let tensor = r#"{"x":{"dtype":"F32","shape":[1000000000,1000000000],"data_offsets":[0,4000000000000000000]}}"#;
    let bytes = safetensors(tensor, 64);
    refused(".safetensors", &bytes, "a large tensor");
    let flat =
        r#"{"arrays":[{"name":"x","element":"f64","shape":[1000000000,1000000],"offset":192}]}"#;
    let mut bytes = [
        &[0; 8][..],
        &64u64.to_le_bytes(),
        &(flat.len() as u64).to_le_bytes(),
        &[0; 40],
        flat.as_bytes(),
    ]
    .concat();
    bytes.resize(256, 0);
    refused(".bin", &bytes, "a large array");
    lying_archives();
    true_claims_of_too_much();
    compressed_texts();
}

/// A frame that claims a large window and content, and JSON with many levels.
fn compressed_texts() {
    let claims = [
        &0xFD2F_B528u32.to_le_bytes()[..],
        &[0x80, 0x80],
        &u32::MAX.to_le_bytes(),
    ]
    .concat();
    for (name, bytes) in [("a.txt.zst", claims), ("a.jsonl", vec![b'['; 1 << 16])] {
        take_largest_bytes();
        let read = fuzzing::texts(name, &bytes);
        let largest = take_largest_bytes();
        assert!(
            read.is_err_and(|error| error.exit_code() == 65),
            "{name} was read"
        );
        assert!(largest <= ALLOWED_BYTES, "{name}: {largest} bytes at once");
    }
    let prompts = fuzzing::prompts("\u{feff}a\r\n \nb\rc\n\n".as_bytes());
    assert_eq!(prompts.ok(), Some(2));
    for bytes in [&b""[..], b"\n \r\n", b"a\n\xff"] {
        assert!(fuzzing::prompts(bytes).is_err_and(|error| error.exit_code() == 65));
    }
    let bytes = ddp::data::text::Encoder::Bytes;
    let tokens: Vec<u8> = "a€ß\u{fffd}😀".bytes().flat_map(|byte| [byte, 0]).collect();
    assert_eq!(fuzzing::decoded(&bytes, 257, &tokens).ok(), Some(13));
    assert!(fuzzing::tokenizer(b"{}").is_err_and(|error| error.exit_code() == 65));
}

/// True sizes that are too large to train on: sparse and highly compressed files are cheap to make.
fn true_claims_of_too_much() {
    let shape = format!("(2, {})", (1 << 24) + 1);
    let wide = npy("|u1", true, &shape, 2 * ((1 << 24) + 1));
    refused(".npy", &wide, "a row of too many numbers, in Fortran order");
    refused(
        ".npy.gz",
        &packed(&wide),
        "a row of too many numbers, in Fortran order",
    );
    refused(
        ".gz",
        &packed(&npy("<f4", false, "(1000000000,)", 64)),
        "a large array",
    );
    let commas = vec![b','; 32 << 20];
    for line in [&b""[..], b"a,b\n"] {
        let table = [line, &commas].concat();
        refused(".csv", &table, "a row of nothing but commas");
        refused(".csv.gz", &packed(&table), "a row of nothing but commas");
    }
}

/// Every four bytes of an archive's directory and of its end as large numbers, in turn.
fn lying_archives() {
    for name in ["mixed.npz", "packed.npz"] {
        let whole = golden(name, &[]);
        let directory = whole
            .windows(4)
            .position(|window| window == b"PK\x01\x02")
            .unwrap();
        for place in directory..whole.len() - 4 {
            for value in [[0xff; 4], [0, 0, 0, 0x40]] {
                let changed = golden(name, &[(place, &value)]);
                take_largest_bytes();
                let read = fuzzing::arrays("a.npz", &changed);
                let largest = take_largest_bytes();
                assert!(
                    largest <= ALLOWED_BYTES,
                    "{name} with byte {place} changed: {largest} bytes at once, {read:?}"
                );
            }
        }
    }
}
