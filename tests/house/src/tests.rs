//! Small crates, written to a temporary folder, with and without cycles.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::api;
use crate::cycles::cycles;
use crate::edges::Parts;
use crate::lines::{code_lines, lines, long_comments};
use crate::modules::Crate;
use crate::waits;

/// A temporary folder with these files; removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn of(files: &[(&str, &str)]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("ddp-house-{}-{number}", std::process::id());
        let folder = Self(std::env::temp_dir().join(name));
        for (path, text) in files {
            let path = folder.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The sizes of the cycles of the crate made of these files, and what is printed about them.
fn found(files: &[(&str, &str)], parts: Parts) -> (Vec<usize>, String) {
    let folder = Folder::of(files);
    let krate = Crate::read(&folder.0.join("lib.rs")).unwrap();
    let found = cycles(&krate, parts);
    let text = found.iter().map(|cycle| cycle.text.as_str()).collect();
    (found.iter().map(|cycle| cycle.parts.len()).collect(), text)
}

fn assert_cycles(files: &[(&str, &str)], sizes: &[usize]) {
    let (found, text) = found(files, Parts::Files);
    assert_eq!(found, sizes, "{text}");
}

fn assert_module_cycles(files: &[(&str, &str)], sizes: &[usize]) {
    assert_cycles(files, &[]);
    let (found, text) = found(files, Parts::TopLevelModules);
    assert_eq!(found, sizes, "{text}");
}

const LIB: (&str, &str) = ("lib.rs", "mod a; mod b;");

#[test]
fn one_direction_is_no_cycle() {
    let a = ("a.rs", "use crate::b::B; pub struct A(B);");
    assert_cycles(&[LIB, a, ("b.rs", "pub struct B;")], &[]);
}

#[test]
fn two_files_that_import_each_other_are_a_cycle() {
    let a = ("a.rs", "use crate::b::B; pub struct A(B);");
    let b = ("b.rs", "use super::a::A; pub struct B; fn f(_: A) {}");
    let (sizes, text) = found(&[LIB, a, b], Parts::Files);
    assert_eq!(sizes, [2]);
    assert!(text.contains("a.rs:1 uses B of"), "{text}");
    assert!(text.contains("b.rs:1 uses A of"), "{text}");
}

#[test]
fn a_path_in_code_counts_without_a_use() {
    let a = ("a.rs", "pub fn f() { crate::b::g() }");
    let b = (
        "b.rs",
        "pub fn g() { let x = [super::a::f()]; println!(\"{:?}\", x) }",
    );
    assert_cycles(&[LIB, a, b], &[2]);
}

#[test]
fn a_path_inside_a_macro_call_counts() {
    let a = ("a.rs", "pub fn f() -> u8 { crate::b::g() }");
    let b = (
        "b.rs",
        "pub fn g() -> u8 { println!(\"{}\", crate::a::f()); 0 }",
    );
    assert_cycles(&[LIB, a, b], &[2]);
}

#[test]
fn a_use_inside_a_function_counts() {
    let a = ("a.rs", "pub fn f() { use crate::b::{g as h, X}; h(X) }");
    let b = (
        "b.rs",
        "pub struct X; pub fn g(_: X) { use crate::{a::{f}}; f() }",
    );
    assert_cycles(&[LIB, a, b], &[2]);
}

#[test]
fn an_imported_module_leads_to_what_is_taken_from_it() {
    let a = ("a.rs", "use crate::b; pub fn f() { b::g() }");
    let b = ("b.rs", "use crate::a; pub fn g() { a::f() }");
    assert_cycles(&[LIB, a, b], &[2]);
}

#[test]
fn a_reexport_leads_to_the_file_that_defines() {
    let lib = ("lib.rs", "mod a; mod b; pub use a::A;");
    let a = ("a.rs", "use crate::b::g; pub struct A; fn f() { g() }");
    let b = ("b.rs", "pub fn g(_: crate::A) {}");
    assert_cycles(&[lib, a, b], &[2]);
}

#[test]
fn a_parent_that_declares_and_reexports_does_not_use_its_child() {
    let lib = ("lib.rs", "mod a;");
    let a = (
        "a.rs",
        "mod part; pub use part::Part; pub(crate) use self::part::*; pub struct Whole;",
    );
    let part = ("a/part.rs", "use super::Whole; pub struct Part(Whole);");
    assert_cycles(&[lib, a, part], &[]);
}

#[test]
fn a_parent_and_a_child_that_use_each_other_are_a_cycle() {
    let lib = ("lib.rs", "mod a;");
    let a = (
        "a.rs",
        "mod part; pub use part::Part; pub struct Whole(Part);",
    );
    let part = ("a/part.rs", "use super::*; pub struct Part(Box<Whole>);");
    assert_cycles(&[lib, a, part], &[2]);
}

#[test]
fn a_glob_counts_for_the_names_that_are_taken() {
    let a = ("a.rs", "use crate::b::*; pub fn f() {}");
    let b = ("b.rs", "use crate::a::f; pub fn g() { f() }");
    assert_cycles(&[LIB, a, b], &[]);
    let a = ("a.rs", "use crate::b::*; pub fn f() { g() }");
    assert_cycles(&[LIB, a, b], &[2]);
}

#[test]
fn code_for_tests_does_not_count() {
    let a = (
        "a.rs",
        "pub struct A; #[cfg(test)] mod tests { use crate::b::B; }
         #[cfg(test)] use crate::b::B;
         impl A { #[cfg(test)] fn f() { crate::b::g() } fn h(&self) {} }",
    );
    let b = (
        "b.rs",
        "use crate::a::A; pub struct B(A); pub fn g() {} #[cfg(test)] mod tests;",
    );
    assert_cycles(&[LIB, a, b], &[]);
}

#[test]
fn modules_inside_a_file_belong_to_the_file() {
    let a = (
        "a.rs",
        "pub struct A; mod inner { use super::A; use super::super::b::B; struct C(A, B); }",
    );
    let b = ("b.rs", "use crate::a::A; pub struct B(A);");
    assert_cycles(&[LIB, a, b], &[2]);
    let a = ("a.rs", "pub struct A; mod inner { struct C(super::A); }");
    assert_cycles(&[LIB, a, b], &[]);
}

#[test]
fn words_that_only_look_like_paths_do_not_count() {
    let a = (
        "a.rs",
        "use crate::b::*; pub fn f(g: u8) -> bool { let x = S.g(); x.g != g && write!(w).g }",
    );
    let b = ("b.rs", "use crate::a::f; pub fn g() { f(0) } fn write() {}");
    assert_cycles(&[LIB, a, b], &[]);
}

#[test]
fn a_macro_is_followed_to_its_file() {
    let lib = ("lib.rs", "#[macro_use] mod a; mod b;");
    let a = (
        "a.rs",
        "macro_rules! m { () => { $crate::b::g() } } pub struct A;",
    );
    let b = ("b.rs", "pub fn g() {} fn h() { m!() }");
    assert_cycles(&[lib, a, b], &[2]);
}

#[test]
fn a_function_and_its_module_may_share_a_name() {
    let lib = ("lib.rs", "mod a; mod b; pub use b::b; pub use a::a;");
    let a = ("a.rs", "pub fn a() {}");
    let b = ("b.rs", "pub fn b() { crate::a() }");
    assert_cycles(&[lib, a, b], &[]);
    let a = ("a.rs", "pub fn a() { crate::b() }");
    assert_cycles(&[lib, a, b], &[2]);
}

#[test]
fn files_in_folders_and_with_a_path_are_found() {
    let lib = ("lib.rs", "mod a; #[path = \"other/name.rs\"] mod b;");
    let a = ("a/mod.rs", "mod c; pub use c::C;");
    let c = ("a/c.rs", "pub struct C(crate::b::B);");
    let b = ("other/name.rs", "pub struct B(Vec<crate::a::C>);");
    assert_cycles(&[lib, a, c, b], &[2]);
}

#[test]
fn top_level_modules_may_be_a_cycle_though_their_files_are_none() {
    let a = ("a.rs", "mod low; mod high;");
    let low = ("a/low.rs", "pub struct Low;");
    let b = ("b.rs", "pub struct B(crate::a::low::Low);");
    let high = ("a/high.rs", "use crate::b::B; pub struct High(B);");
    assert_module_cycles(&[LIB, a, low, high, b], &[2]);
    let (_, text) = found(&[LIB, a, low, high, b], Parts::TopLevelModules);
    assert!(text.contains("a/high.rs:1 uses B of b"), "{text}");
    let high = ("a/high.rs", "pub struct High(super::low::Low);");
    assert_module_cycles(&[LIB, a, low, high, b], &[]);
}

#[test]
fn a_reexport_does_not_dissolve_a_cycle_of_top_level_modules() {
    let a = ("a.rs", "pub use crate::b::inner::X;");
    let inner = ("b/inner.rs", "pub struct X;");
    for user in [
        "pub mod inner; use crate::a::X; pub struct B(X);",
        "pub mod inner; use crate::a; pub struct B(a::X);",
        "pub mod inner; pub fn f(x: crate::a::X) {}",
        "pub mod inner; pub fn f() { use crate::{a::{X}}; X }",
        "pub mod inner; pub mod prelude { pub use crate::a::*; }",
    ] {
        assert_module_cycles(&[LIB, a, inner, ("b.rs", user)], &[2]);
    }
    let b = ("b.rs", "pub mod inner; pub struct B(inner::X);");
    assert_module_cycles(&[LIB, a, inner, b], &[]);
    // The root's re-exports lead to the module that defines.
    let lib = ("lib.rs", "mod a; mod b; pub use b::inner::X;");
    let a = ("a.rs", "pub struct A(crate::X);");
    assert_module_cycles(&[lib, a, inner, b], &[]);
}

#[test]
fn code_and_comments_are_told_apart() {
    let text = "let x = \"// no comment\"; // comment\n/* a\n b */ let y = '\"';\nr#\"\n// text \"#; let z: &'a str;\n";
    let found: Vec<(bool, bool)> = lines(text)
        .iter()
        .map(|line| (!line.code.trim().is_empty(), line.comment))
        .collect();
    let expected = [(true, true), (false, true), (true, true), (true, false)];
    assert_eq!(found[..4], expected);
    assert_eq!(found[4], (true, false));
}

#[test]
fn tests_blanks_and_comments_are_no_code_lines() {
    let text = "//! Head.\n\nuse a::b;\n\n/// Doc.\nfn f() {\n    // why\n    g();\n}\n\n#[cfg(test)]\nmod tests {\n    fn h() {}\n}\n";
    assert_eq!(code_lines(text), 4);
    assert_eq!(code_lines("#[cfg(test)]\nmod tests;\nfn f() {}\n"), 1);
    assert_eq!(
        code_lines("#[cfg(test)]\nfn for_tests() {}\nfn f() {}\n"),
        2
    );
}

#[test]
fn a_comment_has_at_most_100_columns() {
    let long = "x".repeat(98);
    let text = format!("// {long}\n//{long}\nlet s = \"{long}\";\nlet x = 1; // {long}\n");
    assert_eq!(long_comments(&text), [1, 4]);
}

#[test]
fn sleeps_without_a_reason_and_short_limits_are_found_in_tests_only() {
    let sleeps = "fn f() {\n    std::thread::sleep(LONG);\n    // Sleep: it is seldom.\n    // Really.\n    std::thread::sleep(LONG);\n}\n";
    let of = |path: &str, text: &str| {
        let found = waits::of(std::path::Path::new(path), text);
        (found.sleeps, found.limits)
    };
    assert_eq!(of("ddp/tests/jobs/a.rs", sleeps), (vec![2], vec![]));
    assert_eq!(of("comm/src/a/tests.rs", sleeps), (vec![2], vec![]));
    assert_eq!(of("tests/simcuda/src/a.rs", sleeps), (vec![], vec![]));
    let in_module = format!("#[cfg(test)]\nmod tests {{\n{sleeps}}}\n");
    assert_eq!(of("comm/src/a.rs", &in_module), (vec![4], vec![]));
    let limits = "assert!(\n    began.elapsed()\n        < std::time::Duration::from_secs(5)\n);\nassert!(began.elapsed() <= Duration::from_millis(60_000));\n";
    assert_eq!(of("comm/tests/a.rs", limits), (vec![], vec![2]));
    let named = "const SOON: Duration = Duration::from_secs(5);\nconst LATE: std::time::Duration = Duration::from_secs(60);\n";
    let found = "assert!(began.elapsed() <= SOON);\nwhile SOON > began.elapsed() {}\nassert!(Duration::from_millis(7) >= it.began.elapsed());\n";
    let passed = "assert!(began.elapsed() < LATE && LATE > began.elapsed());\nassert!(began.elapsed() < 20 * SOON && began.elapsed() > SOON);\n";
    let limits = format!("{named}{found}{passed}");
    assert_eq!(of("comm/tests/a.rs", &limits), (vec![], vec![3, 4, 5]));
}

#[test]
fn what_is_public_is_listed_and_nothing_else() {
    let text = "pub struct A<T> { pub x: Vec<T>, y: u8 }\nstruct B;\nimpl A<u8> { pub fn f(&self, a: [u8; 2]) -> u8 { 1 } fn g() {} }\n\
                pub(crate) fn h() {}\npub enum C { D, E(u8) }\npub trait F { fn i(self); }\n#[cfg(test)]\nimpl A<u8> { pub fn j() {} }\n";
    let mut lines = Vec::new();
    api::add(&syn::parse_file(text).unwrap().items, &mut lines);
    let expected = [
        "struct A<T> { x: Vec<T> }",
        "A<u8>: fn f(&self, a: [u8; 2]) -> u8",
        "enum C { D, E { u8 } }",
        "trait F: { fn i(self); }",
    ];
    assert_eq!(lines, expected);
}
