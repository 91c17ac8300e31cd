//! That an error which says what was expected and what was found also says what helps.
//!
//! In a function whose error is a `String`, a text is part of an error, and the caller adds the
//! rest. Anywhere else it is the whole error.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::Lit;

use crate::modules::is_cfg_test;

/// Calls and variables that such a text may be given to, since the help comes with them:
/// `Error::Internal` asks for a report, `Problem::new(action, reason, help)` takes it beside the
/// text, and closures called `refused` add the help of all errors of their function.
const BRING_HELP: [&str; 3] = ["Internal", "reason", "refused"];

/// Beginnings of texts that need no help of their own.
const NO_HELP: [&str; 3] = [
    // A wrong argument in the caller's code, whose line it names.
    "{op}: {what}: expected {expected}, got {got} ({line})",
    // One of several problems of a table: their help is the last line.
    "expected numbers, got texts in {what}",
    // What is wrong with a file of a key: `Secret::of_user` adds the help.
    "expected a file of this user ({user}), got one of user {}",
];

/// The errors without help in the product's tokens of a module, each with its line.
pub(crate) fn without_help(tokens: &TokenStream) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    walk(tokens.clone(), false, &mut found);
    found
}

/// `is_part`: whether texts here are only part of an error, or have their help already.
fn walk(tokens: TokenStream, is_part: bool, found: &mut Vec<(usize, String)>) {
    let trees: Vec<TokenTree> = tokens.into_iter().collect();
    // The signature of the function whose body is to come.
    let mut signature: Option<String> = None;
    let (mut is_for_tests, mut is_variable) = (false, false);
    for (at, tree) in trees.iter().enumerate() {
        let before = |back: usize| at.checked_sub(back).map(|at| trees[at].to_string());
        let is_before = |back: usize, text: &str| before(back).is_some_and(|it| it == text);
        match tree {
            TokenTree::Group(group) if is_before(1, "#") => {
                let inside = group.stream();
                is_for_tests |= is_cfg_test(inside.clone());
                if !inside.to_string().starts_with("doc") {
                    walk(inside, is_part, found);
                }
            }
            TokenTree::Group(group) => {
                let is_body = group.delimiter() == Delimiter::Brace;
                let of = if is_body { signature.take() } else { None };
                if let Some(signature) = &mut signature {
                    *signature += &tree.to_string();
                }
                let call = before(if is_before(1, "!") { 2 } else { 1 });
                let brings = call.is_some_and(|name| BRING_HELP.contains(&&*name));
                let is_part = of.map_or(is_part || is_variable || brings, |it| gives_text(&it));
                if !is_for_tests {
                    walk(group.stream(), is_part, found);
                }
                is_for_tests &= !is_body;
            }
            TokenTree::Literal(literal) => {
                if let Lit::Str(text) = Lit::new(literal.clone())
                    && !is_part
                    && !is_variable
                    && lacks_help(&text.value())
                {
                    found.push((literal.span().start().line, text.value()));
                }
            }
            TokenTree::Punct(sign) if sign.as_char() == ';' => {
                (signature, is_for_tests, is_variable) = (None, false, false);
            }
            TokenTree::Ident(name) if *name == "fn" => {
                let is_named = matches!(trees.get(at + 1), Some(TokenTree::Ident(_)));
                signature = is_named.then(String::new).or(signature);
            }
            TokenTree::Ident(name) => {
                if let Some(signature) = &mut signature {
                    *signature += &format!(" {name} ");
                }
            }
            other => {
                let is_set = is_before(2, "let") && other.to_string() == "=";
                is_variable |= is_set && before(1).is_some_and(|name| BRING_HELP.contains(&&*name));
                if let Some(signature) = &mut signature {
                    *signature += &other.to_string();
                }
            }
        }
    }
}

fn lacks_help(text: &str) -> bool {
    let says_both = text.contains("expected ") && text.contains(", got ");
    let has_help = text.contains("help: ") || text.ends_with("{help}");
    says_both && !has_help && !NO_HELP.iter().any(|beginning| text.starts_with(beginning))
}

/// Whether a function of this signature returns a text, or one as its error.
fn gives_text(signature: &str) -> bool {
    let signature = signature.split(" where ").next().unwrap_or_default();
    let Some((_, returned)) = signature.rsplit_once("->") else {
        return false;
    };
    let returned: String = returned.split_whitespace().collect();
    let is_inner = returned.contains("Result<Result<") && returned.ends_with(",String>>");
    is_inner || ["String", "Option<String>"].contains(&&*returned) || returned.ends_with(",String>")
}

#[cfg(test)]
mod tests {
    use super::without_help;

    fn lines(code: &str) -> Vec<usize> {
        let found = without_help(&code.parse().unwrap());
        found.into_iter().map(|(line, _)| line).collect()
    }

    #[test]
    fn an_error_without_help_is_found_however_it_is_made() {
        for made in [
            "bail!(\n\"a: expected 1, got {x}\")",
            "ensure!(x == 1, Usage,\n\"a: expected 1, got {x}\")",
            "return Err(Error::Data(format!(\n\"a: expected 1, \\\n   got {x}\")))",
            "let text =\nr\"a: expected 1, got 2\"; Err(Error::Data(text.into()))",
            "if x { y.map_err(|_| other(format!(\n\"a: expected 1, got {x}\"))) }",
        ] {
            let function = format!("fn f(x: u8) -> Result<String> {{ {made} }}");
            assert_eq!(lines(&function), [2], "{made}");
            assert_eq!(lines(&format!("impl A {{ {function} }}")), [2], "{made}");
        }
        let attribute = "enum E { #[error(\n\"expected {0}, got {1}\")] A(u8, u8) }";
        assert_eq!(lines(attribute), [2]);
    }

    #[test]
    fn help_counts_in_the_text_or_where_it_is_given() {
        for made in [
            "bail!(\"a: expected 1, got {x}; help: give 1\")",
            "bail!(\"a: expected 1, got {x}; \\\n help: give 1\")",
            "bail!(\"a: expected 1, got {x}{help}\")",
            "Err(Error::Internal(format!(\"a: expected 1, got {x}\")))",
            "refused(format!(\"a: expected 1, got {x}\"))",
            "let reason = format!(\"a: expected 1, got {x}\"); Problem::new(reason, help)",
            "bail!(\"expected 1 rather than {x}\")",
        ] {
            let function = format!("fn f(x: u8) -> Result<()> {{ {made} }}");
            assert_eq!(lines(&function), [], "{made}");
        }
        let after = "fn f() { let reason = 1; g(\n\"expected 1, got 2\"); }";
        assert_eq!(lines(after), [2]);
    }

    #[test]
    fn texts_of_functions_that_return_texts_are_parts_and_those_after_them_are_not() {
        let body = "{ bail!(\"expected 1, got 2\") }";
        for returned in [
            "String",
            "Result<u8, String>",
            "Result<Vec<u8>, String> where T: Fn() -> u8",
        ] {
            assert_eq!(
                lines(&format!("fn f(g: fn() -> u8) -> {returned} {body}")),
                []
            );
        }
        let next = format!("fn f() -> String {body}\nfn g(h: String) -> Result<u8> {body}");
        assert_eq!(lines(&next), [2]);
    }

    #[test]
    fn comments_and_tests_do_not_count() {
        let code = "/// Says expected 1, got 2.\nfn f() {}\n\
                    #[cfg(test)] fn g() { h(\"expected 1, got 2\") }\nfn i() { j(\"expected 1, got 2\") }";
        assert_eq!(lines(code), [4]);
    }
}
