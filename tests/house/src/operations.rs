//! docs/operations.md: a table of all operations, from the functions of `kernels/src/ops/` and
//! their comments.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use quote::ToTokens;
use syn::{Expr, ExprLit, FnArg, Item, ItemFn, Lit, Meta, ReturnType, UseTree, Visibility};

/// The page.
pub(crate) const PAGE: &str = "docs/operations.md";

/// Where operations are exported, and the folder of their files.
const OPS: &str = "kernels/src/ops.rs";

const HEAD: &str = "\
# Operations

For people who write layers: every operation on tensors, in `ddp::kernels::ops`. `ddp-house
operations` makes this page from the source; `launch/test` checks that it is up to date.

Arguments without a type are tensors; one with `?` may be missing. Operations that end in `_into`
write into tensors that they are given, and allocate nothing. A `CustomOp` calls the
functions under \"backward\"; a [module](adding-a-model.md#4-layers-by-their-formula) has no need of
them. These functions are operations, too, with – in that column. `cargo doc -p ddp-kernels --open` describes the types,
such as `Attention`. [Adding an op](adding-an-op.md) says how to write another operation.

| operation | what it does | backward |
|---|---|---|
";

/// A function, and the file that it is in.
struct Operation {
    module: String,
    name: String,
    signature: String,
    /// The paragraphs of its comment.
    about: Vec<String>,
}

/// The page as it should be.
pub(crate) fn page() -> Result<String, String> {
    let mut all = Vec::new();
    for (module, names) in exported()? {
        let path = format!("kernels/src/ops/{module}.rs");
        let functions = parse(&path)?
            .items
            .into_iter()
            .filter_map(|item| match item {
                Item::Fn(function) if matches!(function.vis, Visibility::Public(_)) => {
                    Some(function)
                }
                _ => None,
            });
        let named = functions.filter(|function| names.contains(&function.sig.ident.to_string()));
        all.extend(named.filter_map(|function| operation(&module, &function)));
    }
    let mut page = HEAD.to_string();
    for one in &all {
        let (about, backward) = (one.text(), backward(one, &all));
        page += &format!("| `{}` | {about} | {backward} |\n", one.signature);
    }
    Ok(page)
}

/// Whether the page is up to date.
pub(crate) fn check() -> Result<bool, String> {
    let is_same = fs::read_to_string(PAGE).is_ok_and(|there| Ok(there) == page());
    if is_same {
        println!("{PAGE} is up to date")
    } else {
        println!(
            "{PAGE} is not what the source says; help: cargo run -p ddp-house operations >{PAGE}"
        )
    }
    Ok(is_same)
}

fn parse(path: &str) -> Result<syn::File, String> {
    let text =
        fs::read_to_string(Path::new(path)).map_err(|e| format!("cannot read {path}: {e}"))?;
    syn::parse_file(&text).map_err(|e| format!("cannot parse {path}: {e}"))
}

/// The exported names of each file.
fn exported() -> Result<BTreeMap<String, Vec<String>>, String> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for item in parse(OPS)?.items {
        if let Item::Use(item) = item
            && matches!(item.vis, Visibility::Public(_))
            && let UseTree::Path(path) = item.tree
        {
            let names = found.entry(path.ident.to_string()).or_default();
            add_names(&path.tree, names);
        }
    }
    found.retain(|module, _| Path::new(&format!("kernels/src/ops/{module}.rs")).exists());
    Ok(found)
}

fn add_names(tree: &UseTree, names: &mut Vec<String>) {
    match tree {
        UseTree::Name(name) => names.push(name.ident.to_string()),
        UseTree::Group(group) => group.items.iter().for_each(|item| add_names(item, names)),
        _ => {}
    }
}

/// None for a function without tensors.
fn operation(module: &str, function: &ItemFn) -> Option<Operation> {
    let text = |tokens: &dyn Fn() -> String| {
        let text = tokens()
            .replace(" < ", "<")
            .replace(" <", "<")
            .replace("< ", "<");
        let text = text
            .replace(" >", ">")
            .replace("& ", "&")
            .replace(" ,", ",")
            .replace(" ;", ";");
        text.replace("<'_>", "")
            .replace('&', "")
            .replace(" :: ", "::")
    };
    let argument = |argument: &FnArg| {
        let FnArg::Typed(argument) = argument else {
            return String::new();
        };
        let kind = text(&|| argument.ty.to_token_stream().to_string());
        let name = text(&|| argument.pat.to_token_stream().to_string());
        match kind.as_str() {
            "Tensor" => name,
            "Option<Tensor>" => format!("{name}?"),
            _ if kind.starts_with("[Tensor") => name,
            _ => format!("{name}: {kind}"),
        }
    };
    let arguments: Vec<String> = function.sig.inputs.iter().map(argument).collect();
    let name = function.sig.ident.to_string();
    let result = match &function.sig.output {
        ReturnType::Default => String::new(),
        ReturnType::Type(_, kind) => text(&|| kind.to_token_stream().to_string()),
    };
    let makes = if result == "Result<Tensor>" {
        " → Tensor"
    } else {
        ""
    };
    let is_of_tensors = function
        .sig
        .to_token_stream()
        .to_string()
        .contains("Tensor");
    is_of_tensors.then(|| Operation {
        module: module.to_string(),
        signature: format!("{name}({}){makes}", arguments.join(", ")),
        name,
        about: paragraphs(function),
    })
}

/// The paragraphs of a function's comment, each on one line.
fn paragraphs(function: &ItemFn) -> Vec<String> {
    let mut paragraphs = vec![String::new()];
    for attribute in &function.attrs {
        if let Meta::NameValue(pair) = &attribute.meta
            && pair.path.is_ident("doc")
            && let Expr::Lit(ExprLit {
                lit: Lit::Str(line),
                ..
            }) = &pair.value
        {
            let line = line
                .value()
                .trim()
                .replace("[`", "`")
                .replace("`]", "`")
                .replace('|', "\\|");
            let last = paragraphs.last_mut().expect("there is one");
            if line.is_empty() {
                paragraphs.push(String::new());
            } else if last.is_empty() {
                *last = line;
            } else {
                *last += &format!(" {line}");
            }
        }
    }
    paragraphs
}

/// How a paragraph about the derivative begins.
const BACKWARD: &str = "Backward: ";

impl Operation {
    fn text(&self) -> String {
        let about = self.about.iter().filter(|text| !text.starts_with(BACKWARD));
        about.map(String::as_str).collect::<Vec<_>>().join(" ")
    }
}

/// What its comment says of its derivative, else the functions of its file that compute it: those
/// whose names begin with its own, if there are any.
fn backward(one: &Operation, all: &[Operation]) -> String {
    if one.name.contains("backward") {
        return "–".into();
    }
    if let Some(said) = one
        .about
        .iter()
        .find_map(|text| text.strip_prefix(BACKWARD))
    {
        return said.into();
    }
    // A shorter form, or a longer one.
    let into = format!("{}_into", one.name);
    let like = one.about[0]
        .strip_prefix("As `")
        .and_then(|rest| rest.split('`').next());
    let other = all
        .iter()
        .find(|other| other.name == into || Some(&*other.name) == like);
    if let Some(other) = other {
        return backward(other, all);
    }
    let of_file = all.iter().filter(|other| other.module == one.module);
    let of_file = of_file.filter(|other| other.name.contains("backward"));
    let (own, others): (Vec<_>, Vec<_>) =
        of_file.partition(|other| other.name.starts_with(one.name.trim_end_matches("_into")));
    let names = if own.is_empty() { others } else { own };
    let names: Vec<String> = names.iter().map(|it| format!("`{}`", it.name)).collect();
    if names.is_empty() {
        return "none".into();
    }
    names.join(", ")
}
