//! Files as numpy writes them, files with false claims, and saving that fails. tests/npy.rs counts
//! what false claims allocate.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::dtype::f16;
use crate::random::Random;
use crate::{DType, Element};

/// A directory of one test, removed at its end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("ddp-npy-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn names(&self) -> Vec<String> {
        let names = fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A file as numpy 2.4.6 wrote it, with the spaces of its header counted:
///
/// ```python
/// f = io.BytesIO(); np.save(f, a); b = f.getvalue(); i, j = b.index(b"}") + 1, b.index(b"\n")
/// print(b[:i], j - i, b[j + 1:])
/// ```
fn golden(start: &[u8], spaces: usize, elements: &[u8]) -> Vec<u8> {
    [start, " ".repeat(spaces).as_bytes(), b"\n", elements].concat()
}

/// `np.arange(6, dtype="<f4").reshape(2, 3)`
fn golden_matrix() -> Vec<u8> {
    golden(
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }",
        58,
        b"\x00\x00\x00\x00\x00\x00\x80?\x00\x00\x00@\x00\x00@@\x00\x00\x80@\x00\x00\xa0@",
    )
}

/// A file of version 1 with this header and nothing careful about it.
fn file(header: &str, elements: &[u8]) -> Vec<u8> {
    let length = u16::try_from(header.len()).unwrap().to_le_bytes();
    [
        b"\x93NUMPY\x01\x00",
        &length[..],
        header.as_bytes(),
        elements,
    ]
    .concat()
}

fn cpu<T: Element>(data: &[T], shape: &[usize]) -> Tensor {
    Tensor::from_slice(data, shape, Device::Cpu).unwrap()
}

/// A tensor of `shape` whose bytes are random.
fn random(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let tensor = Tensor::empty(shape, dtype, Device::Cpu).unwrap();
    let noise = Tensor::randint(
        256,
        &[tensor.bytes()],
        DType::U8,
        Device::Cpu,
        &mut Random::new(seed),
    )
    .unwrap();
    tensor
        .borrow("x", true, Caller::new("test"))
        .unwrap()
        .elements_mut::<u8>()
        .copy_from_slice(&noise.to_vec::<u8>().unwrap());
    tensor
}

fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.contiguous().unwrap();
    tensor
        .borrow("x", false, Caller::new("test"))
        .unwrap()
        .elements::<u8>()
        .to_vec()
}

/// Same dtype, same shape, same bits.
#[track_caller]
fn assert_same(one: &Tensor, other: &Tensor) {
    assert_eq!((one.dtype(), one.shape()), (other.dtype(), other.shape()));
    assert!(
        bytes_of(one) == bytes_of(other),
        "{one} and {other} differ in their elements"
    );
}

/// The array, and that numpy's own bytes come out when it is saved.
#[track_caller]
fn read_and_saved_alike(name: &str, file: &[u8], expected: &Tensor) {
    let scratch = Scratch::new(name);
    let path = scratch.path("a.npy");
    assert_same(&parse(file, Device::Cpu).unwrap(), expected);
    expected.save_npy(&path).unwrap();
    assert_eq!(
        fs::read(&path).unwrap().escape_ascii().to_string(),
        file.escape_ascii().to_string()
    );
    assert_same(&Tensor::load_npy(&path, Device::Cpu).unwrap(), expected);
}

#[test]
fn what_numpy_writes_is_read_and_written_byte_for_byte() {
    let data = [0.0_f32, 1.0, 2.0, 3.0, 4.0, 5.0];
    read_and_saved_alike("f4", &golden_matrix(), &cpu(&data, &[2, 3]));
    // np.array(1.5)
    let start = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (), }";
    read_and_saved_alike(
        "0d",
        &golden(start, 62, b"\x00\x00\x00\x00\x00\x00\xf8?"),
        &cpu(&[1.5_f64], &[]),
    );
    // np.array([1, -2, 3])
    let start = b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }";
    let elements = [
        1_i64.to_le_bytes(),
        (-2_i64).to_le_bytes(),
        3_i64.to_le_bytes(),
    ]
    .concat();
    read_and_saved_alike(
        "i8",
        &golden(start, 60, &elements),
        &cpu(&[1_i64, -2, 3], &[3]),
    );
    // np.zeros(0, "u1")
    let start = b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (0,), }";
    read_and_saved_alike("u1", &golden(start, 60, b""), &cpu::<u8>(&[], &[0]));
    // np.array([1, -0.5], "f2")
    let start = b"\x93NUMPY\x01\x00v\x00{'descr': '<f2', 'fortran_order': False, 'shape': (2,), }";
    let expected = cpu(&[f16::from_f32(1.0), f16::from_f32(-0.5)], &[2]);
    read_and_saved_alike("f2", &golden(start, 60, b"\x00<\x00\xb8"), &expected);
    // np.arange(2, dtype="i4").reshape(1, 2, 1)
    let start =
        b"\x93NUMPY\x01\x00v\x00{'descr': '<i4', 'fortran_order': False, 'shape': (1, 2, 1), }";
    read_and_saved_alike(
        "i4",
        &golden(start, 55, b"\0\0\0\0\x01\0\0\0"),
        &cpu(&[0_i32, 1], &[1, 2, 1]),
    );
    // np.zeros((1,) * 8, "u1")
    let start = b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (1, 1, 1, 1, 1, 1, 1, 1), }";
    read_and_saved_alike("8d", &golden(start, 40, b"\0"), &cpu(&[0_u8], &[1; 8]));
}

#[test]
fn other_layouts_are_refused_with_the_call_that_helps() {
    for (header, help) in [
        (
            "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3)}",
            "np.ascontiguousarray(a)",
        ),
        (
            "{'descr': '>f4', 'fortran_order': False, 'shape': (6,)}",
            "astype('<f4')",
        ),
        (
            "{'descr': '|b1', 'fortran_order': False, 'shape': (24,)}",
            "astype('<f4')",
        ),
    ] {
        let error = parse(&file(header, &[0; 24]), Device::Cpu).unwrap_err();
        assert!(error.to_string().contains(help), "{error}");
    }
}

#[test]
fn versions_two_and_three_have_a_longer_length() {
    let one = golden_matrix();
    for version in [2, 3] {
        let longer = [b"\x93NUMPY", &[version, 0, 118, 0, 0, 0], &one[10..]].concat();
        assert_same(
            &parse(&longer, Device::Cpu).unwrap(),
            &parse(&one, Device::Cpu).unwrap(),
        );
    }
    for version in [[0, 0], [1, 1], [4, 0], [255, 255]] {
        let error = parse(
            &[b"\x93NUMPY", &version[..], &one[8..]].concat(),
            Device::Cpu,
        )
        .unwrap_err()
        .to_string();
        assert!(
            error.contains(&format!("version {}.{}; supported", version[0], version[1])),
            "{error}"
        );
    }
}

#[test]
fn every_dtype_and_kind_of_shape_survives_a_round_trip() {
    let scratch = Scratch::new("round");
    let path = scratch.path("a.npy");
    for dtype in DType::ALL.into_iter().filter(|&dtype| dtype != DType::BF16) {
        // Without dimensions, empty, odd, of the most dimensions, and of more than 1 MiB.
        for shape in [
            &[][..],
            &[0],
            &[3, 0, 5],
            &[1],
            &[7, 3],
            &[1, 2, 1, 2, 1, 2, 1, 2],
            &[1025, 1031],
        ] {
            let tensor = random(shape, dtype, 7);
            tensor.save_npy(&path).unwrap();
            assert_same(&Tensor::load_npy(&path, Device::Cpu).unwrap(), &tensor);
            let bytes = fs::read(&path).unwrap();
            assert_same(&parse(&bytes, Device::Cpu).unwrap(), &tensor);
        }
        let view = random(&[65, 40], dtype, 8)
            .slice(3..50)
            .unwrap()
            .t()
            .unwrap();
        view.save_npy(&path).unwrap();
        assert_same(&Tensor::load_npy(&path, Device::Cpu).unwrap(), &view);
    }
    assert_eq!(scratch.names(), ["a.npy"], "no temporary file stays");
}

#[test]
fn bf16_is_refused_with_help() {
    let tensor = Tensor::zeros(&[2], DType::BF16, Device::Cpu)
        .unwrap()
        .named("w");
    let error = tensor
        .save_npy("/nonexistent/w.npy")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("\"w\" bf16[2] on cpu") && error.contains(".to_dtype(DType::F32)"),
        "{error}"
    );
    assert!(error.contains(file!()), "{error}");
}

/// One byte a call, with an interruption before each.
struct Drip<'a>(&'a [u8], bool);

impl Read for Drip<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.1 = !self.1;
        if self.1 {
            return Err(ErrorKind::Interrupted.into());
        }
        let count = buffer.len().min(1);
        self.0.read(&mut buffer[..count])
    }
}

#[test]
fn a_reader_of_one_byte_at_a_time_gives_the_same_tensor() {
    let file = golden_matrix();
    let read = |file: &[u8]| {
        let (reader, path) = (Drip(file, false), Path::new("drip"));
        load(reader, 152, path, Device::Cpu, Caller::new("test"))
    };
    assert_eq!(file.len(), 152);
    assert_same(&read(&file).unwrap(), &parse(&file, Device::Cpu).unwrap());
    let error = read(&file[..151]).unwrap_err().to_string();
    assert!(error.contains("the file has shrunk"), "{error}");
}

#[test]
fn every_truncation_is_an_error_and_so_is_a_byte_too_many() {
    let mut file = golden_matrix();
    for length in 0..file.len() {
        let error = parse(&file[..length], Device::Cpu).unwrap_err();
        assert!(matches!(error, Error::BadFile { .. }), "{length}: {error}");
    }
    file.push(0);
    let error = parse(&file, Device::Cpu).unwrap_err().to_string();
    assert!(
        error.contains("the header claims f32[2, 3] = 24 bytes, but 25 bytes follow it"),
        "{error}"
    );
}

#[test]
fn every_changed_byte_of_the_header_gives_a_tensor_no_larger_than_the_file_or_an_error() {
    let file = golden_matrix();
    let mut read_count = 0;
    for position in 0..128 {
        for value in 0..=255 {
            let mut changed = file.clone();
            changed[position] = value;
            if let Ok(tensor) = parse(&changed, Device::Cpu) {
                assert!(tensor.bytes() <= 24);
                read_count += 1;
            }
        }
    }
    assert!(read_count >= 128, "the file itself, once a position");
}

#[test]
fn claims_beyond_the_file_are_errors_that_give_both_figures() {
    let error = parse(
        &file(
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1000, 1000)}",
            &[0; 12],
        ),
        Device::Cpu,
    )
    .unwrap_err();
    let text = "the header claims f32[1000, 1000] = 4000000 bytes, but 12 bytes follow it";
    assert!(error.to_string().ends_with(text), "{error}");
    // A header of 4 GiB, of which nothing is there.
    let error = parse(b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", Device::Cpu)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("claims 4294967295 bytes; at most 65536"),
        "{error}"
    );
    for (bytes, named) in [
        (&b"PK\x03\x04\x14\0\0\0\0\0"[..], "np.save"),
        (
            b"\x80\x04\x95\0\0\0\0\0\0\0",
            "a pickle, which is never read",
        ),
        (b"hello, world", "begins with \"hello, w\""),
        (b"", "it ends within its magic and version"),
    ] {
        let error = parse(bytes, Device::Cpu).unwrap_err().to_string();
        assert!(
            error.starts_with("\"<bytes in memory>\": not a usable .npy file: "),
            "{error}"
        );
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn what_is_not_an_ordinary_file_is_refused_at_once() {
    let scratch = Scratch::new("kinds");
    let fifo = scratch.path("fifo");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    for (path, what) in [
        (fifo.as_path(), "a pipe (FIFO)"),
        (&scratch.0, "a directory"),
        (Path::new("/dev/full"), "a device"),
    ] {
        for error in [
            Tensor::load_npy(path, Device::Cpu).unwrap_err(),
            cpu(&[1_u8], &[1]).save_npy(path).unwrap_err(),
        ] {
            assert!(matches!(error, Error::BadFile { .. }), "{error}");
            assert!(error.to_string().contains(what), "{error}");
        }
    }
    let error = Tensor::load_npy(scratch.path("missing.npy"), Device::Cpu).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Io {
                doing: "opening",
                ..
            }
        ),
        "{error}"
    );
    assert!(matches!(
        Tensor::load_npy(&fifo, Device::Cuda(99)),
        Err(Error::DeviceAbsent { .. })
    ));
}

#[test]
fn a_save_that_cannot_begin_is_an_error_and_leaves_nothing() {
    let scratch = Scratch::new("full");
    let path = scratch.path("a.npy");
    let old = cpu(&[1.0_f32, 2.0], &[2]);
    old.save_npy(&path).unwrap();
    // Into a directory that is not there, and one in which nothing can be made.
    for path in [
        scratch.path("no/a.npy"),
        PathBuf::from("/proc/a.npy"),
        PathBuf::new(),
    ] {
        let error = old.save_npy(&path).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
    }
}

#[test]
fn saving_follows_links_and_keeps_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new("links");
    let (path, link) = (scratch.path("a.npy"), scratch.path("link.npy"));
    let (old, new) = (cpu(&[1_i32], &[1]), cpu(&[2_i32, 3], &[2]));
    old.save_npy(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    new.save_npy(&link).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    let dangling = scratch.path("dangling.npy");
    std::os::unix::fs::symlink("beyond.npy", &dangling).unwrap();
    let error = new.save_npy(&dangling).unwrap_err().to_string();
    assert!(
        error.contains("a link to a file that does not exist"),
        "{error}"
    );
    let circle = scratch.path("circle.npy");
    std::os::unix::fs::symlink(&circle, &circle).unwrap();
    assert!(new.save_npy(&circle).is_err());
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o640
    );
    assert_same(&Tensor::load_npy(&path, Device::Cpu).unwrap(), &new);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o440)).unwrap();
    let error = old.save_npy(&path).unwrap_err().to_string();
    assert!(error.contains("read-only"), "{error}");
    assert_same(&Tensor::load_npy(&path, Device::Cpu).unwrap(), &new);
    let names = ["a.npy", "circle.npy", "dangling.npy", "link.npy"];
    assert_eq!(scratch.names(), names, "no temporary file stays");
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(start in 0_usize..11, bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let bytes = [&golden_matrix()[..start], &bytes].concat();
        if let Ok(tensor) = parse(&bytes, Device::Cpu) {
            prop_assert!(tensor.bytes() <= bytes.len());
        }
    }

    #[test]
    fn any_shape_survives(dims in prop::collection::vec(0_usize..5, 0..=8), seed in any::<u64>()) {
        let tensor = random(&dims, DType::I32, seed);
        let bytes = [written("<i4", &dims), bytes_of(&tensor)].concat();
        let header_bytes = bytes.len() - tensor.bytes();
        prop_assert!(header_bytes > 0 && header_bytes.is_multiple_of(64));
        assert_same(&parse(&bytes, Device::Cpu).unwrap(), &tensor);
    }
}

fn parsed(text: &str) -> Result<(DType, bool, Shape), String> {
    parse_header(text.as_bytes(), dtype_of)
}

#[test]
fn every_spelling_that_python_gives_the_same_dict_is_read() {
    let expected = (DType::F32, false, Shape::new(&[2, 3]).unwrap());
    for text in [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}      \n",
        "{\"shape\":(2,3,),\"descr\":\"<f4\",\"fortran_order\":False}",
        " {\n 'fortran_order' : False ,\t'shape' : ( 2L , 3L ) , 'descr' : '<f4' , } \n",
    ] {
        assert_eq!(parsed(text), Ok(expected), "{text}");
    }
}

#[test]
fn what_is_wrong_is_named() {
    let of_shape =
        |shape: &str| format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
    let of_descr =
        |descr: &str| format!("{{'descr': {descr}, 'fortran_order': False, 'shape': (2,), }}");
    for (text, named) in [
        (String::new(), "EOF"),
        ("{}".into(), "missing field `descr`"),
        (
            "{'descr': '<f4', 'shape': ()}".into(),
            "missing field `fortran_order`",
        ),
        (
            "{'descr': '<f4', 'descr': '<f4'}".into(),
            "duplicate field `descr`",
        ),
        ("{'flavour': 1}".into(), "unknown field `flavour`"),
        ("{'descr' '<f4'}".into(), "expected `:`"),
        ("{'descr': '<f4' 'shape': ()}".into(), "expected `,` or `}`"),
        (
            "{'descr': '<f4', 'fortran_order': 0, 'shape': ()}".into(),
            "expected a boolean",
        ),
        (
            "{'descr': '<f4', 'fortran_order': Falsehood, 'shape': ()}".into(),
            "not as numpy writes it",
        ),
        (of_shape("(2, 3"), "not as numpy writes it"),
        (of_shape("(2 3)"), "expected `,` or `]`"),
        (of_shape("(-1,)"), "invalid value: integer `-1`"),
        (of_shape("(03,)"), "invalid number"),
        (of_shape("(3.0,)"), "expected usize"),
        (of_shape("((3,),)"), "expected usize"),
        (of_shape("((((((((3))))))))"), "expected usize"),
        (
            of_shape("(1, 1, 1, 1, 1, 1, 1, 1, 1)"),
            "more than 8 dimensions",
        ),
        (of_shape("(99999999999999999999999,)"), "expected usize"),
        (
            of_shape("(4294967296, 4294967296)"),
            "more elements than this machine",
        ),
        (
            of_shape("(0, 18446744073709551615, 2)"),
            "more elements than this machine",
        ),
        (of_shape("(2,)") + "x", "trailing characters"),
        (of_shape("(2,)") + "\0", "trailing characters"),
        (of_descr("'<i2'"), "'<i2'; supported are <f2"),
        (of_descr("'<u4'"), "astype('<f4')"),
        (of_descr("'<c8'"), "'<c8'"),
        (of_descr("'<U3'"), "'<U3'"),
        (of_descr("'|O'"), "'|O'; supported"),
        (of_descr("'|V2'"), "'|V2'; supported"),
        (of_descr("'|f4'"), "'|f4'; supported"),
        (of_descr("''"), "''; supported"),
        (
            of_descr("[('x', '<f4'), ('y', '<f4')]"),
            "structured: [[\"x\",\"<f4\"],[\"y\",\"<f4\"]]",
        ),
        (of_descr("('<f4', (2,))"), "structured"),
        (of_descr("'<f4"), "not as numpy writes it"),
        (of_descr("'<f4\\n'"), "'<f4\\n'; supported"),
    ] {
        let problem = parsed(&text).unwrap_err();
        assert!(
            problem.contains(named),
            "{text}\n  gave: {problem}\n  without: {named}"
        );
    }
    // The length of what a header holds does not make the message long.
    assert!(
        parsed(&of_descr(&format!("'{}'", "x".repeat(60_000))))
            .unwrap_err()
            .len()
            < 300
    );
}

#[test]
fn deep_nesting_is_refused_at_its_first_bracket() {
    for bracket in ["(", "[", "{"] {
        assert!(parsed(&format!("{{'shape': {}", bracket.repeat(60_000))).is_err());
        assert!(parsed(&format!("{{'descr': {}", bracket.repeat(60_000))).is_err());
        assert!(parsed(&bracket.repeat(60_000)).is_err());
    }
}
