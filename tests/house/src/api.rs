//! tests/house/api.txt: what the libraries export, a line for each item, so that most changes
//! of it are seen there. Implementations of traits, derives and what macros make are not listed.
//! `unreachable_pub` is on: what is `pub` can be reached.

use std::fs;

use proc_macro2::TokenStream;
use quote::{ToTokens as _, quote};
use syn::{Fields, ImplItem, Item, TraitItem, Visibility};

use crate::modules::is_for_tests;
use crate::packages;

/// The list.
pub(crate) const PAGE: &str = "tests/house/api.txt";

const LIBRARIES: [&str; 8] = [
    "ddp-kernels",
    "ddp-comm",
    "ddp-nn",
    "ddp-data",
    "ddp-tables",
    "ddp-engine",
    "ddp-tools",
    "ddp",
];

/// The list as it should be.
pub(crate) fn page() -> Result<String, String> {
    let mut page = String::new();
    for package in packages::find(&LIBRARIES.map(str::to_owned))? {
        let library = package.roots.iter().find(|it| it.ends_with("lib.rs"));
        let library = library.ok_or_else(|| format!("{} has no lib.rs", package.name))?;
        let mut files = crate::modules::Crate::read(library)?.files;
        files.sort();
        for file in files {
            let text = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
            let parsed = syn::parse_file(&text).map_err(|e| format!("{}: {e}", file.display()))?;
            let mut lines = Vec::new();
            add(&parsed.items, &mut lines);
            if !lines.is_empty() {
                page += &format!("{}\n    {}\n", file.display(), lines.join("\n    "));
            }
        }
    }
    Ok(page)
}

/// Whether the list is up to date.
pub(crate) fn check() -> Result<bool, String> {
    let (there, made) = (fs::read_to_string(PAGE).unwrap_or_default(), page()?);
    if there == made {
        println!("{PAGE} is up to date");
        return Ok(true);
    }
    let only = |these: &str, those: &str, mark: char| {
        let these = these
            .lines()
            .filter(|it| !those.lines().any(|other| other == *it));
        these.map(|it| format!("{mark} {it}\n")).collect::<String>()
    };
    print!("{}{}", only(&there, &made, '-'), only(&made, &there, '+'));
    println!("{PAGE} is not what the source exports; help: cargo run -p ddp-house api >{PAGE}");
    Ok(false)
}

fn is_public(seen: &Visibility) -> bool {
    matches!(seen, Visibility::Public(_))
}

/// Adds the public ones of `items`.
pub(crate) fn add(items: &[Item], lines: &mut Vec<String>) {
    let mut say = |what: TokenStream| lines.push(in_one_line(&what));
    for item in items {
        match item {
            Item::Const(it) if is_public(&it.vis) => {
                let (name, ty) = (&it.ident, &it.ty);
                say(quote!(const #name: #ty));
            }
            Item::Static(it) if is_public(&it.vis) => {
                let (name, ty) = (&it.ident, &it.ty);
                say(quote!(static #name: #ty));
            }
            Item::Fn(it) if is_public(&it.vis) => say(it.sig.to_token_stream()),
            Item::Type(it) if is_public(&it.vis) => {
                let (name, generics, ty) = (&it.ident, &it.generics, &it.ty);
                say(quote!(type #name #generics = #ty));
            }
            Item::Use(it) if is_public(&it.vis) => {
                let tree = &it.tree;
                say(quote!(use #tree));
            }
            Item::Struct(it) if is_public(&it.vis) => {
                let (name, generics) = (&it.ident, &it.generics);
                let fields = fields(&it.fields, false);
                say(quote!(struct #name #generics #fields));
            }
            Item::Enum(it) if is_public(&it.vis) => {
                let (name, generics) = (&it.ident, &it.generics);
                let variants = it.variants.iter().map(|variant| {
                    let (name, fields) = (&variant.ident, fields(&variant.fields, true));
                    quote!(#name #fields)
                });
                say(quote!(enum #name #generics { #(#variants),* }));
            }
            Item::Trait(it) if is_public(&it.vis) => {
                let (name, generics, above) = (&it.ident, &it.generics, &it.supertraits);
                let items = it.items.iter().filter_map(|item| match item {
                    TraitItem::Fn(it) => Some(it.sig.to_token_stream()),
                    TraitItem::Const(it) => {
                        let (name, ty) = (&it.ident, &it.ty);
                        Some(quote!(const #name: #ty))
                    }
                    TraitItem::Type(it) => {
                        let name = &it.ident;
                        Some(quote!(type #name))
                    }
                    _ => None,
                });
                say(quote!(trait #name #generics: #above { #(#items;)* }));
            }
            Item::Impl(it) if it.trait_.is_none() && !it.attrs.iter().any(is_for_tests) => {
                let of = &it.self_ty;
                for item in &it.items {
                    match item {
                        ImplItem::Fn(it) if is_public(&it.vis) => {
                            let signature = &it.sig;
                            say(quote!(#of: #signature));
                        }
                        ImplItem::Const(it) if is_public(&it.vis) => {
                            let (name, ty) = (&it.ident, &it.ty);
                            say(quote!(#of: const #name: #ty));
                        }
                        _ => {}
                    }
                }
            }
            Item::Macro(it) if it.attrs.iter().any(|at| at.path().is_ident("macro_export")) => {
                let name = &it.ident;
                say(quote!(macro #name));
            }
            _ => {}
        }
    }
}

/// The public fields, or all; nothing if there are none.
fn fields(fields: &Fields, all: bool) -> Option<TokenStream> {
    let seen: Vec<TokenStream> = (fields.iter())
        .filter(|it| all || is_public(&it.vis))
        .map(|field| {
            let (name, ty) = (field.ident.iter(), &field.ty);
            quote!(#(#name:)* #ty)
        })
        .collect();
    (!seen.is_empty()).then(|| quote!({ #(#seen),* }))
}

/// As text without the spaces that tokens have between them.
fn in_one_line(tokens: &TokenStream) -> String {
    let mut text = tokens.to_string();
    let tight = [
        (" ::", "::"),
        (":: ", "::"),
        (" :", ":"),
        (" ,", ","),
        (",)", ")"),
        (" ;", ";"),
        ("& ", "&"),
        (" (", "("),
        ("( ", "("),
        (" )", ")"),
        ("[ ", "["),
        (" ]", "]"),
        (" <", "<"),
        ("< ", "<"),
        (" >", ">"),
        (" !", "!"),
        (":(", ": ("),
        (",(", ", ("),
        ("->(", "-> ("),
        (")->", ") ->"),
    ];
    for (wide, narrow) in tight {
        text = text.replace(wide, narrow);
    }
    text
}
